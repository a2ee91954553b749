"""q-FedAvg against its equations in numpy, and what q does to the losses."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.server.qfedavg import QFedAvg
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, train_batches
from tests.methods.reference import assert_close
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}


def fair(here: Setup) -> list[tuple[np.ndarray, dict[int, float]]]:
    """x after every round, and the F_i of those who delivered."""
    q, x, seen = here.method.hyper.model_dump()["q"], start(here), []
    for round in range(here.rounds):
        upper, lower, losses, lr = np.zeros(10), 0.0, {}, rate(here, round)
        for i in with_status(here.population.sample_round(round), "delivered"):
            y = x
            for batch in train_batches(here, round, i):
                y = y - lr * batch.gradient(y)
            g, losses[i] = (x - y) / lr, points(here, i).loss(x) + 1e-10
            upper = upper + losses[i] ** q * g
            lower += q * losses[i] ** (q - 1) * (g @ g) + losses[i] ** q / lr
        x = x - upper / lower if losses else x
        seen.append((x, losses))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"q": 1.0}, {"q": 4.0, "epochs": 2, "lr_decay": 0.8}, {"q": 0.3}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("qfedavg", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    records, run_states = play(here)
    for record, run_state, (x, losses) in zip(records, run_states, fair(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        measured = {m.client: m.value for m in record.metrics if m.name == "qfedavg/loss" and m.client is not None}
        assert {i: value for i, value in measured.items() if i in losses} == pytest.approx(losses, rel=1e-5)
    # delta_i, and two numbers of 4 bytes.
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(320 + 64, 320)}


def test_q_0_is_fedavg_with_a_uniform_mean():
    ends = [
        flat(play(made(name, {**HYPER, **hyper}, clients=ABSENCES[1]))[1][-1].server["params"])
        for name, hyper in (("fedavg", {"weighting": "uniform"}), ("qfedavg", {"q": 0.0}))
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-6)


def test_losses_become_more_equal_as_q_rises():
    spreads = []
    for q in (0.0, 1.0, 5.0):
        here = made("qfedavg", {"lr": 0.1, "steps": 2, "batch_size": 0, "q": q}, rounds=300)
        x = flat(play(here)[1][-1].server["params"])
        spreads.append(np.std([points(here, i).loss(x) for i in range(4)]))
    assert spreads[0] > 1.2 * spreads[1] > 1.2**2 * spreads[2]


@pytest.mark.parametrize("hyper", [{"momentum": 0.9}, {"optimizer": "adam"}, {"weighting": "samples"}], ids=str)
def test_what_it_cannot_use_is_refused(hyper: dict[str, Any]):
    with refused(names=[next(iter(hyper))]):
        QFedAvg.Hyper(**hyper)
