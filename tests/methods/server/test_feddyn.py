"""FedDyn against its equations in numpy, its invariant under losses, and its fixed point."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.methods.server.feddyn import FedDyn
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, made, optima, rate, train_batches, wells
from tests.methods.own_models import data, personal
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
SOLVED = {"lr": 0.6, "steps": 6, "batch_size": 0, "alpha": 0.5}
"""A step multiplies the distance from the local minimum by 1 - 0.6 (h + 0.5), which is 0.1 for h = 1."""


def dynamic(here: Setup, alpha: float) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, h and all h_i [4, 10] after every round, in the paper's signs: theta_i - x, and h <- h - alpha / N sum."""
    x, h, own, seen = start(here), np.zeros(10), np.zeros((4, 10)), []
    decay = here.method.hyper.model_dump()["weight_decay"]
    for round in range(here.rounds):
        delivered, ends = with_status(here.population.sample_round(round), "delivered"), []
        for i in delivered:
            theta = x
            for batch in train_batches(here, round, i):
                gradient = batch.gradient(theta) + decay * theta - own[i] + alpha * (theta - x)
                theta = theta - rate(here, round) * gradient
            own[i] = own[i] - alpha * (theta - x)
            ends.append(theta)
        if ends:
            h = h - alpha / 4 * sum(theta - x for theta in ends)
            x = np.mean(ends, axis=0) - h / alpha
        seen.append((x, h, own.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"alpha": 0.3}, {"alpha": 1.5, "epochs": 2, "lr_decay": 0.8, "weight_decay": 0.2}], ids=str
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    here, alpha = made("feddyn", {**HYPER, **hyper}, rounds=6, clients=clients), hyper["alpha"]
    records, run_states = play(here)
    for run_state, (x, h, own) in zip(run_states, dynamic(here, alpha), strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(alpha * flat(run_state.server["shift"]), h, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(alpha * personal(here, run_state, "shift"), own, rtol=1e-4, atol=1e-5)
    # FedAvg's bytes, without a number of examples.
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(320, 320)}


@pytest.mark.parametrize("uplink", [Dense(dtype="fp16"), TopK(keep_ratio=0.3), ErrorFeedback(inner=TopK())], ids=str)
def test_both_memories_move_with_what_arrived(uplink: Compressor):
    here = made("feddyn", {**HYPER, "alpha": 0.5}, rounds=8, uplink=uplink, clients=ABSENCES[2])
    run_states, kept = play(here)[1], 0
    x, shift, before = start(here), np.zeros(10), np.zeros((4, 10))
    for round, run_state in enumerate(run_states):
        own, server = personal(here, run_state, "shift"), run_state.server
        np.testing.assert_allclose(flat(server["shift"]), own.mean(axis=0), atol=2e-6)
        delivered = with_status(here.population.sample_round(round), "delivered")
        for i in range(4):
            assert np.array_equal(own[i], before[i]) == (i not in delivered)
            kept += i not in delivered and bool(own[i].any())
        if delivered:
            mean = (own - before).sum(axis=0) / len(delivered)
            np.testing.assert_allclose(flat(server["params"]), x - mean - flat(server["shift"]), atol=5e-6)
        else:
            assert np.array_equal(flat(server["params"]), x) and np.array_equal(flat(server["shift"]), shift)
        x, shift, before = flat(server["params"]), flat(server["shift"]), own
    assert kept


def test_an_exact_solution_makes_h_i_the_gradient_at_once():
    # grad f_i(y) + alpha (y - x) = 0, so h_i = alpha (x - y) = grad f_i(y), with y = (h c + alpha x) / (h + alpha).
    here = made("feddyn", {**SOLVED, "steps": 20}, rounds=1)
    (run_state,), (h, c) = play(here)[1], wells(here)
    y = (h * c + 0.5 * start(here)) / (h + 0.5)
    np.testing.assert_allclose(0.5 * personal(here, run_state, "shift"), h * (y - c), atol=1e-5)


def test_converges_to_the_minimum_with_three_of_four_clients():
    """Where FedAvg stops elsewhere. 100 rounds of float32 keep h the mean of the h_i."""
    here = made("feddyn", SOLVED, rounds=100, clients={"per_round": 3})
    run_state, (h, c) = play(here)[1][-1], wells(here)
    minimum = optima(h, c, np.ones(4))
    np.testing.assert_allclose(flat(run_state.server["params"]), minimum, atol=1e-5)
    own = 0.5 * personal(here, run_state, "shift")
    np.testing.assert_allclose(own, [client.gradient(minimum) for client in data(here)], atol=1e-5)
    assert np.abs(own).max() > 0.1
    np.testing.assert_allclose(0.5 * flat(run_state.server["shift"]), own.mean(axis=0), atol=1e-4 * np.abs(own).max())


def test_the_mean_of_the_clients_last_models_is_evaluated():
    """Of those who delivered last, y_i = x - delta_i; an empty round leaves it. `cloud` evaluates x."""
    hyper = {**HYPER, "alpha": 0.5}
    options = {"rounds": 8, "clients": ABSENCES[2], "evaluation": Evaluation()}
    here, cloud = made("feddyn", hyper, **options), made("feddyn", {**hyper, "judged": "cloud"}, **options)
    (records, run_states), (others, other_states) = play(here), play(cloud)
    x, before, mean, empty = start(here), np.zeros((4, 10)), start(here), 0
    for round, (run_state, other) in enumerate(zip(run_states, other_states, strict=True)):
        own, delivered = (
            personal(here, run_state, "shift"),
            with_status(here.population.sample_round(round), "delivered"),
        )
        empty += not delivered
        if delivered:
            mean = np.mean([x - (own[i] - before[i]) for i in delivered], axis=0)
        x, before = flat(run_state.server["params"]), own
        assert flat(other.server["params"]).tolist() == x.tolist()
        np.testing.assert_allclose(flat(here.server_half.model(run_state.server)), mean, atol=2e-6)
        assert flat(cloud.server_half.model(other.server)).tolist() == x.tolist()
    assert empty and np.abs(mean - x).max() > 0.01
    for found, model in ((records, mean), (others, x)):
        losses = {m.client: m.value for m in found[-1].metrics if m.name == "own/loss" and m.client is not None}
        assert losses == pytest.approx({i: points(here, i, "test").loss(model) for i in range(4)}, rel=1e-4)


def test_it_has_no_weights_and_needs_alpha():
    with refused(names=["weighting"]):
        FedDyn.Hyper(weighting="samples")
    with refused(names=["alpha=0.0", "greater than 0"]):
        FedDyn.Hyper(alpha=0.0)
