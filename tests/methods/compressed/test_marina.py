"""MARINA against its equations in float64, its coin and its bytes, and its linear rate where DCGD stalls."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.determinism import seeding
from rayfl.methods.base import Context
from rayfl.methods.compressed.marina import MARINA
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.convex import (
    CLIENTS,
    DENSE_BITS,
    RATIO,
    SPARSE_BITS,
    RandK,
    Softmax,
    assert_follows,
    bits,
    distances,
    draws,
    gradient,
    rand_k,
    same_coin,
    softmax_setup,
)
from tests.population.statuses import with_status
from tests.refusals import refused


def followed(method: MARINA, here: Setup) -> dict[str, list[np.ndarray]]:
    """x and g after every round, by the equations; a client that is absent is out of the mean."""
    hyper = method.hyper
    p = np.array(TRAIN if hyper.weighting == "samples" else [1] * 4, float)
    coins = same_coin(here, hyper.dense_probability or RATIO)
    x, g, points = start(here), np.zeros(10), {i: (-1, start(here)) for i in CLIENTS}
    seen: dict[str, list[np.ndarray]] = {"params": [], "gradient": []}
    started = False
    for round in range(here.rounds):
        there, sent = with_status(here.population.sample_round(round), "delivered"), {}
        for i in there:
            now, (last, old) = gradient(here, i, x, hyper.l2), points[i]
            points[i] = (round, x)
            if coins[round] or not started:
                sent[i] = now
            elif last == round - 1:
                sent[i] = rand_k(now - gradient(here, i, old, hyper.l2), draws(here, round, i))
        if sent:
            mean = np.average(list(sent.values()), axis=0, weights=[p[i] for i in sent])
            g = mean if coins[round] or not started else g + mean
            x = x - hyper.lr * hyper.lr_decay**round * g
        started = bool(sent)
        seen["params"].append(x)
        seen["gradient"].append(g)
    return seen


@pytest.mark.parametrize(
    "hyper", [{}, {"dense_probability": 0.5, "l2": 0.5, "lr_decay": 0.95}, {"weighting": "samples"}], ids=str
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_algorithm_1(hyper: dict[str, Any], engine: str):
    method = MARINA(Quadratic(), MARINA.Hyper(**{"lr": 0.15, **hyper}))
    here = setup(method, rounds=12, uplink=RandK(), engine=engine)
    records, run_states = play(here)
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    # Exact bytes by the coin: 4P, or C(P); the first round is dense; 4P down.
    dense = same_coin(here, method.hyper.dense_probability or RATIO)
    assert 0 < sum(dense[1:]) < 11
    extra = 64 if method.hyper.weighting == "samples" else 0
    sizes = [DENSE_BITS if coin or round == 0 else SPARSE_BITS for round, coin in enumerate(dense)]
    assert bits(records) == [{(size + extra, DENSE_BITS)} for size in sizes]
    told = [next(m.value for m in record.metrics if m.name == "marina/dense") for record in records]
    assert told == [float(size == DENSE_BITS) for size in sizes]


def test_clients_that_were_away_are_silent_until_they_know_the_old_point():
    method = MARINA(Quadratic(), MARINA.Hyper(lr=0.1))
    here = setup(method, rounds=16, uplink=RandK(), clients={"per_round": 3, "dropout_before_download": 0.2})
    records, run_states = play(here)
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    assert any(row.status == "silent" for record in records for row in record.clients)


def test_after_a_round_in_which_nothing_arrived_g_is_made_anew():
    method = MARINA(Quadratic(), MARINA.Hyper(lr=0.1, dense_probability=1e-9))
    here = setup(method, rounds=5, uplink=RandK())
    nobody = setup(method, rounds=5, uplink=RandK(), clients={"dropout_after_training": 1 - 1e-12})
    _, (*_, second) = play(here, rounds=2)
    _, (third,) = play(nobody, run_state=second, rounds=3)
    np.testing.assert_array_equal(flat(third.server["params"]), flat(second.server["params"]))
    records, (fourth, _) = play(here, run_state=third)
    assert [size for round in bits(records) for size, _ in round] == [DENSE_BITS, SPARSE_BITS]
    x = flat(third.server["params"])
    exact = np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
    np.testing.assert_allclose(flat(fourth.server["gradient"]), exact, atol=2e-6)


def test_the_server_and_all_clients_see_one_coin():
    seen: dict[int, list[bool]] = {}

    class Watched(MARINA):
        def is_dense(self, ctx: Context) -> bool:
            seen.setdefault(ctx.round, []).append(super().is_dense(ctx))
            return super().is_dense(ctx)

    here = setup(Watched(Quadratic(), Watched.Hyper(lr=0.1)), rounds=30, uplink=RandK())
    play(here)
    for round in range(1, 30):
        # Four clients, and the server before and after them; the clock asks for each client, too.
        assert len(seen[round]) >= 6 and set(seen[round]) == {seeding.coin(here.seed, round) < RATIO}
    assert {coin for coins in seen.values() for coin in coins} == {False, True}


def test_the_mean_bytes_are_p_dense_and_the_rest_compressed():
    here = setup(MARINA(Quadratic(), MARINA.Hyper(lr=0.1)), rounds=120, uplink=RandK())
    records, _ = play(here)
    mean = np.mean([row.uplink_bits for record in records[1:] for row in record.clients])
    # Four standard deviations of the mean of 119 coins.
    slack = 4 * (DENSE_BITS - SPARSE_BITS) * np.sqrt(RATIO * (1 - RATIO) / 119)
    assert abs(mean - (RATIO * DENSE_BITS + (1 - RATIO) * SPARSE_BITS)) < slack


def test_both_gradients_are_of_one_minibatch():
    here = setup(
        MARINA(Quadratic(), MARINA.Hyper(lr=0.1, batch_size=2, dense_probability=1e-9)), rounds=5, uplink=Dense()
    )
    _, run_states = play(here)
    x = old = start(here)
    g, expected = np.zeros(10), []
    for round in range(5):
        (each,) = zip(*(batches(here, round, i, steps=1, batch_size=2) for i in CLIENTS), strict=True)
        difference = [batch.gradient(x) - (batch.gradient(old) if round else 0) for batch in each]
        g = g + np.mean(difference, axis=0)
        x, old = x - 0.1 * g, x
        expected.append(x)
    assert_follows(run_states, "params", expected)


def test_clients_remember_the_point_that_they_received():
    here = setup(MARINA(Quadratic(), MARINA.Hyper(lr=0.1)), rounds=4, uplink=RandK())
    executor = InlineExecutor(here)
    _, run_states = play(here, executor)
    for before, after in pairwise(run_states):
        for ref in after.states.values():
            state = tree.to_tensors(executor.get(ref))
            np.testing.assert_array_equal(flat(state["point"]), flat(before.server["params"]))


def test_without_compression_it_is_gradient_descent():
    here = setup(MARINA(Quadratic(), MARINA.Hyper(lr=0.3)), rounds=10)
    records, run_states = play(here)
    x, expected = start(here), []
    for _ in range(10):
        x = x - 0.3 * np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        expected.append(x)
    assert_follows(run_states, "params", expected)
    assert bits(records) == [{(DENSE_BITS, DENSE_BITS)}] * 10


def test_p_must_be_given_where_the_uplink_states_no_omega():
    with refused(names=["method.dense_probability", "topk", "unbiased"]):
        play(setup(MARINA(Quadratic()), uplink=TopK(keep_ratio=0.5)))


@pytest.mark.slow
def test_it_converges_linearly_where_dcgd_stalls():
    """Softmax regression with l2 on clients that disagree, rand-k with omega = 1 and so p = 1/2."""
    l2, omega, n, p = 1.0, 1.0, 10, 0.5
    convex = Softmax(softmax_setup({"name": "dcgd"}, 1), l2)
    minimiser = convex.minimiser()
    lr = min(1 / (convex.smoothness() * (1 + np.sqrt(2 * (1 - p) * omega / (p * n)))), p / (2 * l2))
    found = {
        name: distances(softmax_setup({"name": name, "l2": l2, "lr": lr}, 160, RandK(ratio=0.5)), minimiser)
        for name in ("dcgd", "marina")
    }
    floor = float(np.mean(found["dcgd"][-60:]))
    assert 0.3 < floor / np.mean(found["dcgd"][-120:-60]) < 3
    assert found["marina"][-1] < floor / 300
    # In theory f - f* falls by 1 - gamma mu a round, and so does what bounds the squared distance.
    for round in range(40, 160, 40):
        assert found["marina"][round] < found["marina"][0] * (1 - lr * l2) ** round
