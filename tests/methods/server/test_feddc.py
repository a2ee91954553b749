"""FedDC against its equations in numpy, FedDyn as one of its cases, and its fixed point."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.methods.server.feddc import FedDC
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.methods.averaging import ABSENCES, ENGINES, made, optima, rate, train_batches, wells
from tests.methods.own_models import data, personal
from tests.methods.reference import assert_close
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
Round = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def decoupled(here: Setup) -> list[Round]:
    """x, c, all h_i and all c_i [4, 10] after every round, with h_i <- h_i + (y_i - x)."""
    hyper, x, c, h, own, seen = here.method.hyper.model_dump(), start(here), np.zeros(10), *np.zeros((2, 4, 10)), []
    alpha, decay = hyper["alpha"], hyper["weight_decay"]
    for round in range(here.rounds):
        ends, changes, lr = [], [], rate(here, round)
        for i in with_status(here.population.sample_round(round), "delivered"):
            y, stream = x, train_batches(here, round, i)
            for batch in stream:
                y = y - lr * (batch.gradient(y) + decay * y + alpha * (y - x + h[i]) - own[i] + c)
            changes.append((x - y) / (len(stream) * lr) - c)
            h[i], own[i] = h[i] + y - x, own[i] + changes[-1]
            ends.append(y)
        if ends:
            c = c + sum(changes) / 4
            x = np.mean(ends, axis=0) + h.mean(axis=0)
        seen.append((x, c, h.copy(), own.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"alpha": 0.3}, {"alpha": 0.8, "epochs": 2, "lr_decay": 0.8, "weight_decay": 0.2}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("feddc", {**HYPER, **hyper}, rounds=5, engine=engine, clients=clients)
    records, run_states = play(here)
    for run_state, (x, c, h, own) in zip(run_states, decoupled(here), strict=True):
        assert_close([flat(run_state.server[name]) for name in ("params", "control_variate")], [x, c])
        found = [-personal(here, run_state, "shift"), personal(here, run_state, "control_variate")]
        # h_i and c_i are sums of differences of models, so their rounding is that of x.
        assert_close(np.concatenate([x[None], *found]), np.concatenate([x[None], h, own]))
        np.testing.assert_allclose(c, own.mean(axis=0), atol=1e-12)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(640, 640)}


def test_the_first_round_moves_twice_as_far_as_fedprox():
    """x_1 = 2 FedProx(x_0) - x_0, as all h_i and c are 0."""
    here = made("feddc", {**HYPER, "alpha": 0.5}, rounds=1)
    prox = made("fedprox", {**HYPER, "mu": 0.5, "weighting": "uniform"}, rounds=1)
    ends = [flat(play(setup)[1][0].server["params"]) for setup in (here, prox)]
    np.testing.assert_allclose(ends[0], 2 * ends[1] - start(here), atol=2e-6)


@pytest.mark.parametrize("clients", [{}, {"per_round": 2}], ids=str)
def test_converges_to_the_minimum_of_the_mean(clients: dict[str, Any]):
    """mean h_i = 0 and grad f_i(x) = c_i - alpha h_i there."""
    here = made("feddc", {"lr": 0.3, "steps": 3, "batch_size": 0, "alpha": 0.3}, rounds=120, clients=clients)
    run_state, (h, c) = play(here)[1][-1], wells(here)
    minimum = optima(h, c, np.ones(4))
    np.testing.assert_allclose(flat(run_state.server["params"]), minimum, atol=2e-5)
    drift, own = -personal(here, run_state, "shift"), personal(here, run_state, "control_variate")
    slopes = np.stack([client.gradient(minimum) for client in data(here)])
    np.testing.assert_allclose(own - 0.3 * drift, slopes, atol=5e-5)
    np.testing.assert_allclose(drift.mean(axis=0), 0, atol=5e-5)
    assert np.abs(slopes).max() > 0.1


@pytest.mark.parametrize("uplink", [Dense(dtype="fp16"), TopK(keep_ratio=0.3)], ids=str)
def test_memories_move_with_what_arrived(uplink: Compressor):
    here = made("feddc", HYPER, rounds=6, uplink=uplink, clients=ABSENCES[2])
    for run_state in play(here)[1]:
        for name in ("shift", "control_variate"):
            mean = personal(here, run_state, name).mean(axis=0)
            np.testing.assert_allclose(flat(run_state.server[name]), mean, atol=2e-6)


@pytest.mark.parametrize("hyper", [{"momentum": 0.9}, {"optimizer": "adam"}, {"weighting": "samples"}], ids=str)
def test_what_it_cannot_use_is_refused(hyper: dict[str, Any]):
    with refused(names=[next(iter(hyper))]):
        FedDC.Hyper(**hyper)
