"""SCAFFOLD against its equations in numpy, its invariant, and where it goes when FedAvg goes elsewhere."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.methods.base import Method
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, optima, scaffolded, wells
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
FULL = {"lr": 0.2, "steps": 4, "batch_size": 0}


def control_variates(executor: InlineExecutor, run_state: RunState) -> np.ndarray:
    """All c_i [4, 10]; 0 for a client that has no state yet."""
    own = np.zeros((4, 10))
    for client, ref in run_state.states.items():
        own[client] = flat(tree.to_tensors(executor.get(ref))["control_variate"])
    return own


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"option": "I"},
        {"option": "I", "control_batch_size": 3, "weighting": "samples", "lr_decay": 0.8},
        {"weighting": "samples", "epochs": 2, "server_lr": 0.6},
        {"steps": 5, "lr_decay": 0.7, "weight_decay": 0.2},
        {"option": "I", "weight_decay": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    here = made("scaffold", {**HYPER, **hyper}, rounds=7, engine=engine, clients=clients)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for run_state, (x, c, own) in zip(run_states, scaffolded(here), strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=5e-6)
        np.testing.assert_allclose(flat(run_state.server["control_variate"]), c, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(control_variates(executor, run_state), own, rtol=1e-4, atol=2e-5)
        # The invariant, whoever took part and however deltas are weighted.
        np.testing.assert_allclose(c, own.mean(axis=0), atol=1e-12)
    # Twice FedAvg's bytes both ways.
    count = 64 if hyper.get("weighting") == "samples" else 0
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(2 * 320 + count, 2 * 320)}


def test_c_is_the_mean_of_gradients_under_full_participation():
    # One full-batch step: both options say c_i = grad f_i(x).
    for option in ("I", "II"):
        here = made("scaffold", {"lr": 0.2, "steps": 1, "batch_size": 0, "option": option}, rounds=1)
        (run_state,) = play(here)[1]
        gradients = [points(here, client).gradient(start(here)) for client in range(4)]
        np.testing.assert_allclose(flat(run_state.server["control_variate"]), np.mean(gradients, axis=0), atol=2e-6)


@pytest.mark.parametrize(
    "uplink",
    [Dense(), Dense(dtype="fp16"), TopK(keep_ratio=0.3), ErrorFeedback(inner=TopK(keep_ratio=0.3))],
    ids=str,
)
@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_c_is_the_mean_whatever_the_uplink_loses(uplink: Compressor, option: str, clients: dict[str, Any]):
    here = made("scaffold", {**HYPER, "option": option}, rounds=8, uplink=uplink, clients=clients)
    executor = InlineExecutor(here)
    for run_state in play(here, executor)[1]:
        owed = np.zeros((4, 10))
        for client, ref in run_state.states.items():
            # What error feedback still holds of the changes c_i - c_i+.
            memory = tree.to_tensors(executor.get(ref)).get("uplink", {}).get("control_variate")
            owed[client] = 0 if memory is None else flat(memory)
        mean = (control_variates(executor, run_state) + owed).mean(axis=0)
        np.testing.assert_allclose(flat(run_state.server["control_variate"]), mean, atol=2e-6)


def test_an_absent_client_keeps_its_control_variate():
    here = made("scaffold", HYPER, rounds=10, clients=ABSENCES[2])
    executor = InlineExecutor(here)
    run_states, kept = play(here, executor)[1], 0
    for round in range(1, 10):
        before, after = (control_variates(executor, run_states[r]) for r in (round - 1, round))
        for client in range(4):
            present = client in with_status(here.population.sample_round(round), "delivered")
            assert (before[client] == after[client]).all() == (not present)
            kept += not present and bool(before[client].any())
    assert kept


def test_converges_to_the_minimum_where_fedavg_does_not():
    # f_i = h_i / 2 (x - c_i)^2 entry by entry, K full-batch steps of lr. FedAvg's delta_i is b_i (x - c_i) with
    # b_i = 1 - (1 - lr h_i)^K, so it stops at sum b_i c_i / sum b_i. SCAFFOLD stops where c = mean_i grad f_i(x) = 0:
    # at sum h_i c_i / sum h_i.
    h, c = wells(made("scaffold", FULL))
    minimum, drifted = optima(h, c, np.ones(4)), optima(1 - (1 - 0.2 * h) ** 4, c, np.ones(4))
    assert np.abs(minimum - drifted).max() > 0.02
    ends = {
        name: flat(play(made(name, {**FULL, "weighting": "uniform"}, rounds=40))[1][-1].server["params"])
        for name in ("fedavg", "scaffold")
    }
    np.testing.assert_allclose(ends["fedavg"], drifted, atol=1e-6)
    np.testing.assert_allclose(ends["scaffold"], minimum, atol=1e-6)


@pytest.mark.parametrize("hyper", [{"option": "I"}, {}, {"weighting": "samples"}, {"weight_decay": 0.3}], ids=str)
@pytest.mark.parametrize("clients", [{}, {"per_round": 3}], ids=str)
def test_converges_in_every_variant(hyper: dict[str, Any], clients: dict[str, Any]):
    # Whoever takes part: the noise of sampling vanishes with the gradients' differences to c_i.
    here = made("scaffold", {**FULL, **hyper}, rounds=40, clients=clients)
    h, c = wells(here)
    decay = hyper.get("weight_decay", 0.0)
    # With weight decay f_i has curvature h + decay and its minimum at h c / (h + decay).
    minimum = optima(h + decay, h * c / (h + decay), np.ones(4))
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), minimum, atol=1e-6)


@pytest.mark.parametrize("hyper", [{"momentum": 0.9}, {"optimizer": "adam"}, {"clip_norm": 1.0}], ids=str)
def test_local_steps_are_plain(hyper: dict[str, Any]):
    with refused(names=["SCAFFOLD", "SGD", next(iter(hyper))]):
        find(Method, "scaffold").Hyper(**hyper)


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_loss_recorded_is_that_of_training(option: str):
    # One full-batch step: the loss at the received model, in either option.
    here = made("scaffold", {"lr": 0.2, "steps": 1, "batch_size": 0, "option": option}, rounds=1)
    ((record,), _) = play(here)
    for client in range(4):
        (value,) = [m.value for m in record.metrics if (m.client, m.name) == (client, "train/loss")]
        assert value == pytest.approx(points(here, client).loss(start(here)), rel=1e-5)
