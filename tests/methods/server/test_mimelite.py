"""MimeLite against its equations in numpy, and centralised momentum SGD as one of its cases."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.server.mimelite import MimeLite
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.methods.reference import assert_close
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
SETTINGS = [
    {},
    {"beta": 0.6, "epochs": 2, "weighting": "uniform", "server_lr": 0.7, "weight_decay": 0.2, "lr_decay": 0.8},
    {"statistics": "adam", "lr": 0.02, "beta": 0.5, "beta2": 0.8, "epsilon": 0.1},
]


def mimicked(here: Setup) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, m and v after every round."""
    hyper, x, m, v, seen = here.method.hyper.model_dump(), start(here), np.zeros(10), np.zeros(10), []
    b, b2, decay, adam = hyper["beta"], hyper["beta2"], hyper["weight_decay"], hyper["statistics"] == "adam"
    for round in range(here.rounds):
        delivered, ends, full = with_status(here.population.sample_round(round), "delivered"), [], []
        for i in delivered:
            y = x
            for batch in train_batches(here, round, i):
                g = batch.gradient(y) + decay * y
                step = (1 - b) * g + b * m
                if adam:
                    step = step / (np.sqrt(b2 * v + (1 - b2) * g**2) + hyper["epsilon"])
                y = y - rate(here, round) * step
            ends.append(y)
            full.append(points(here, i).gradient(x) + decay * x)
        if ends:
            weights = [share(here, i) for i in delivered]
            g = np.average(full, axis=0, weights=weights)
            m, v = b * m + (1 - b) * g, b2 * v + (1 - b2) * g**2
            x = x + hyper["server_lr"] * (np.average(ends, axis=0, weights=weights) - x)
        seen.append((x, m, v))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", SETTINGS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("mimelite", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    records, run_states = play(here)
    adam = hyper.get("statistics") == "adam"
    for run_state, (x, m, v) in zip(run_states, mimicked(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        assert_close(flat(run_state.server["statistics"]["mean"]), m)
        if adam:
            assert_close(flat(run_state.server["statistics"]["square"]), v)
    # Down x and s, up delta and G: two trees each way, and v more of adam.
    count = 0 if hyper.get("weighting") == "uniform" else 64
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(640 + count, 960 if adam else 640)}


def test_one_full_batch_step_of_all_is_momentum_sgd():
    here = made("mimelite", {"lr": 0.4, "steps": 1, "batch_size": 0, "beta": 0.7, "weighting": "uniform"}, rounds=6)
    x, m = start(here), np.zeros(10)
    for run_state in play(here)[1]:
        m = 0.7 * m + 0.3 * np.mean([points(here, i).gradient(x) for i in range(4)], axis=0)
        x = x - 0.4 * m
        assert_close(flat(run_state.server["params"]), x)


def test_without_memory_it_is_fedavg():
    ends = [
        flat(play(made(name, {**HYPER, **hyper}, clients=ABSENCES[1]))[1][-1].server["params"])
        for name, hyper in (("fedavg", {}), ("mimelite", {"beta": 0.0}))
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-6)


@pytest.mark.parametrize("hyper", [{"momentum": 0.9}, {"optimizer": "adam"}, {"beta2": 0.5}], ids=str)
def test_what_it_cannot_use_is_refused(hyper: dict[str, Any]):
    with refused(names=[next(iter(hyper))]):
        MimeLite.Hyper(**hyper)
