"""FedAvgM against its equations in numpy, and against FedAvg where it is FedAvg."""

from typing import Any

import numpy as np
import pytest

from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.methods.averaging import ABSENCES, ENGINES, HeavyBall, assert_follows, followed, made, wells
from tests.population.statuses import with_status

HYPER = {"lr": 0.1, "batch_size": 2}


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"server_momentum": 0.5, "server_lr": 0.7, "weighting": "uniform"},
        {"server_momentum": 0.0, "server_lr": 1.5, "epochs": 3, "lr_decay": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    here = made("fedavgm", {**HYPER, **hyper}, rounds=8, engine=engine, clients=clients)
    settings = here.method.hyper.model_dump()
    path = followed(here, HeavyBall(settings["server_lr"], settings["server_momentum"]))
    records, run_states = play(here)
    assert_follows(run_states, path)
    # FedAvg's wire: 40 bytes down, and up with 8 more for a count.
    up = 320 + (64 if settings["weighting"] == "samples" else 0)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


def test_the_defaults_are_those_of_the_paper():
    settings = made("fedavgm", {}).method.hyper.model_dump()
    assert (settings["server_momentum"], settings["server_lr"], settings["weighting"]) == (0.9, 1.0, "samples")


def test_three_rounds_in_closed_form():
    # Full-batch steps: y_K - c = (1 - lr h)^K (x - c), so delta_i = (1 - (1 - lr h_i)^K) (x - c_i) =: b_i (x - c_i).
    here = made(
        "fedavgm", {"lr": 0.2, "steps": 3, "batch_size": 0, "weighting": "uniform", "server_momentum": 0.6}, rounds=3
    )
    curvatures, centres = wells(here)
    b = 1 - (1 - 0.2 * curvatures) ** 3

    def delta(x: np.ndarray) -> np.ndarray:
        return (b * (x - centres)).mean(axis=0)

    x0 = start(here)
    x1 = x0 - delta(x0)
    x2 = x1 - delta(x1) - 0.6 * delta(x0)
    x3 = x2 - delta(x2) - 0.6 * delta(x1) - 0.36 * delta(x0)
    assert_follows(play(here)[1], [x1, x2, x3])


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_without_momentum_it_is_fedavg(clients: dict[str, Any]):
    plain = play(made("fedavg", HYPER, clients=clients))[1]
    moving = play(made("fedavgm", {**HYPER, "server_momentum": 0.0}, clients=clients))[1]
    for one, other in zip(plain, moving, strict=True):
        assert flat(one.server["params"]).tolist() == flat(other.server["params"]).tolist()


def test_a_round_in_which_nothing_arrives_moves_nothing():
    here = made("fedavgm", HYPER, rounds=10, clients=ABSENCES[2])
    run_states = play(here)[1]
    empty = [round for round in range(1, 10) if not with_status(here.population.sample_round(round), "delivered")]
    assert empty
    for round in empty:
        before, after = run_states[round - 1].server, run_states[round].server
        for part, other in ((before, after), (before["optimizer"], after["optimizer"])):
            name = "params" if part is before else "velocity"
            assert flat(part[name]).tolist() == flat(other[name]).tolist()
