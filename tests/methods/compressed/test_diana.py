"""DIANA against its equations in float64, its invariant, and its linear rate where DCGD stalls."""

from typing import Any, Literal

import numpy as np
import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.methods.compressed.diana import DIANA
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.convex import (
    CLIENTS,
    DENSE_BITS,
    RATIO,
    SPARSE_BITS,
    RandK,
    Softmax,
    assert_follows,
    assert_shift_is_the_mean,
    bits,
    distances,
    draws,
    gradient,
    prox,
    rand_k,
    softmax_setup,
)
from tests.population.statuses import with_status
from tests.refusals import refused


def followed(method: DIANA, here: Setup) -> dict[str, list[np.ndarray]]:
    """x, h and v after every round, by the equations; alpha = 1 / (1 + omega) = 0.3 unless given."""
    hyper = method.hyper
    p = np.array(TRAIN if hyper.weighting == "samples" else [1] * 4, float)
    p, alpha = p / p.sum(), hyper.alpha or RATIO
    x, shifts, v = start(here), np.zeros((4, 10)), np.zeros(10)
    seen: dict[str, list[np.ndarray]] = {"params": [], "shift": [], "velocity": []}
    for round in range(here.rounds):
        there = with_status(here.population.sample_round(round), "delivered")
        difference = {i: gradient(here, i, x, hyper.l2) - shifts[i] for i in there}
        exact = hyper.start == "gradient" and round == 0
        sent = {i: d if exact else rand_k(d, draws(here, round, i)) for i, d in difference.items()}
        weights = [p[i] for i in there]
        g = p @ shifts + np.average(list(sent.values()), axis=0, weights=weights)
        for i in there:
            shifts[i] = shifts[i] + (1.0 if exact else alpha) * sent[i]
        v = hyper.momentum * v + g
        x = prox(x - hyper.lr * v, hyper.lr * hyper.l1)
        for name, value in (("params", x), ("shift", p @ shifts), ("velocity", v)):
            seen[name].append(value)
    return seen


@pytest.mark.parametrize(
    "hyper",
    [{}, {"alpha": 0.2, "momentum": 0.5, "l2": 0.5, "l1": 0.1}, {"weighting": "samples"}, {"start": "gradient"}],
    ids=str,
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_algorithm_1(hyper: dict[str, Any], engine: str):
    method = DIANA(Quadratic(), DIANA.Hyper(**{"lr": 0.15, **hyper}))
    here = setup(method, rounds=8, uplink=RandK(), engine=engine)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    extra = 64 if method.hyper.weighting == "samples" else 0
    first = DENSE_BITS if method.hyper.start == "gradient" else SPARSE_BITS
    assert bits(records) == [{(first + extra, DENSE_BITS)}] + [{(SPARSE_BITS + extra, DENSE_BITS)}] * 7
    if method.hyper.weighting == "uniform":
        assert_shift_is_the_mean(here, executor, run_states)


@pytest.mark.parametrize("begin", ["zero", "gradient"])
def test_the_servers_shift_stays_the_mean_of_all_where_some_are_away(begin: Literal["zero", "gradient"]):
    method = DIANA(Quadratic(), DIANA.Hyper(lr=0.1, start=begin))
    here = setup(method, rounds=12, uplink=RandK(), clients={"per_round": 3, "dropout_after_training": 0.2})
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    delivered = [record.row.delivered for record in records]
    assert min(delivered) > 0 and min(delivered) < 3
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    assert_shift_is_the_mean(here, executor, run_states)


def test_alpha_must_be_given_where_the_uplink_states_no_omega():
    with refused(names=["topk", "method.alpha", "unbiased"]):
        play(setup(DIANA(Quadratic()), uplink=TopK(keep_ratio=0.5)))
    play(setup(DIANA(Quadratic(), DIANA.Hyper(alpha=0.5)), uplink=TopK(keep_ratio=0.5)))


def test_a_dense_uplink_has_alpha_1_so_that_shifts_are_gradients():
    here = setup(DIANA(Quadratic(), DIANA.Hyper(lr=0.1)), rounds=3, uplink=Dense())
    run_states = play(here)[1]
    x = start(here)
    for run_state in run_states:
        g = np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        np.testing.assert_allclose(np.concatenate([t.numpy().ravel() for t in run_state.server["shift"].values()]), g,
                                   atol=2e-6)  # fmt: skip
        x = x - 0.1 * g


@pytest.mark.slow
def test_it_converges_linearly_where_dcgd_stalls():
    """Softmax regression with l2 on clients that disagree: the gradients of single clients at x* are not 0."""
    l2, omega, n = 1.0, 1.0, 10
    convex = Softmax(softmax_setup({"name": "dcgd"}, 1), l2)
    minimiser = convex.minimiser()
    assert np.square(convex.gradients(minimiser)).sum(axis=(1, 2)).mean() > 1
    lr = 1 / (convex.smoothness() * (1 + 6 * omega / n))
    found = {
        name: distances(softmax_setup({"name": name, "l2": l2, "lr": lr}, 160, RandK(ratio=0.5)), minimiser)
        for name in ("dcgd", "diana")
    }
    # DCGD makes no progress any more, 300 times farther from x* (measured after 150 rounds: 560 times).
    floor = float(np.mean(found["dcgd"][-60:]))
    assert 0.3 < floor / np.mean(found["dcgd"][-120:-60]) < 3
    assert found["diana"][-1] < floor / 300
    # In theory the squared distance falls by max(1 - gamma mu, 1 - alpha / 2) a round.
    rate = max(1 - lr * l2, 1 - 0.5 / 2)
    for round in range(40, 160, 40):
        assert found["diana"][round] < found["diana"][0] * rate**round
