"""EF21 against its equations in float64, G = mean_i h_i after losses, and its linear rate where DCGD stalls."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.compress import random
from rayfl.compress.base import Compressor
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.lossless import Lossless
from rayfl.compress.sparse import TopK
from rayfl.methods.base import Method
from rayfl.methods.compressed.dcgd import DCGD
from rayfl.methods.compressed.ef21 import EF21
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.convex import (
    CLIENTS,
    DENSE_BITS,
    RATIO,
    SPARSE_BITS,
    RandK,
    assert_follows,
    assert_shift_is_the_mean,
    bits,
    draws,
    gradient,
    rand_k,
    top_k,
)
from tests.population.statuses import with_status
from tests.refusals import refused

TOP_K = TopK(keep_ratio=RATIO)
ABSENT = {"per_round": 3, "dropout_after_training": 0.2, "upload_loss": 0.2}


def followed(method: EF21, here: Setup) -> dict[str, list[np.ndarray]]:
    """x and G after every round, by the equations. An unbiased C is divided by 1 + omega = 1 / RATIO."""
    hyper = method.hyper
    compress, factor = (rand_k, RATIO) if isinstance(here.uplink, RandK) else (top_k, 1.0)
    p = np.array(TRAIN if hyper.weighting == "samples" else [1] * 4, float)
    p = p / p.sum()
    x, shifts = start(here), np.zeros((4, 10))
    seen: dict[str, list[np.ndarray]] = {"params": [], "shift": []}
    for round in range(here.rounds):
        there = with_status(here.population.sample_round(round), "delivered")
        for i in there:
            difference = gradient(here, i, x, hyper.l2) - shifts[i]
            shifts[i] = shifts[i] + factor * compress(difference, draws(here, round, i))
        x = x - hyper.lr * hyper.lr_decay**round * (p @ shifts if there else 0)
        seen["params"].append(x)
        seen["shift"].append(p @ shifts)
    return seen


@pytest.mark.parametrize("uplink", [TOP_K, RandK()], ids=["topk", "randk"])
@pytest.mark.parametrize("hyper", [{}, {"l2": 0.5, "lr_decay": 0.9}, {"weighting": "samples"}], ids=str)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_algorithm_2(hyper: dict[str, Any], uplink: Compressor, engine: str):
    method = EF21(Quadratic(), EF21.Hyper(**{"lr": 0.15, **hyper}))
    here = setup(method, rounds=8, uplink=uplink, engine=engine)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    if method.hyper.weighting == "uniform":
        assert_shift_is_the_mean(here, executor, run_states)
    if isinstance(uplink, RandK):
        extra = 64 if method.hyper.weighting == "samples" else 0
        assert bits(records) == [{(SPARSE_BITS + extra, DENSE_BITS)}] * 8


@pytest.mark.parametrize("uplink", [TOP_K, RandK()], ids=["topk", "randk"])
def test_g_stays_the_mean_of_all_where_uploads_are_lost(uplink: Compressor):
    method = EF21(Quadratic(), EF21.Hyper(lr=0.1))
    here = setup(method, rounds=16, uplink=uplink, clients=ABSENT)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    assert {"delivered", "upload_lost", "dropped_after_training"} == {r.status for one in records for r in one.clients}
    for name, expected in followed(method, here).items():
        assert_follows(run_states, name, expected)
    assert_shift_is_the_mean(here, executor, run_states)


def test_without_compression_it_is_gradient_descent():
    here = setup(EF21(Quadratic(), EF21.Hyper(lr=0.3)), rounds=20)
    x, expected = start(here), []
    for _ in range(20):
        x = x - 0.3 * np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        expected.append(x)
    assert_follows(play(here)[1], "params", expected)


def test_it_converges_at_its_rate_where_dcgd_stalls():
    """Psi = f - f* + gamma / theta mean_i ||h_i - grad f_i||^2 falls by 1 - gamma mu a round, at the largest gamma."""
    curvatures = np.array([points(setup(EF21), i).hessian() for i in CLIENTS])
    hessian = curvatures.mean(axis=0)
    mu, smooth, root_mean = hessian.min(), hessian.max(), np.sqrt((curvatures.max(axis=1) ** 2).mean())
    # 3 of 8 entries, and 1 of 2.
    delta = 3 / 8
    theta = 1 - np.sqrt(1 - delta)
    gamma = min(1 / (smooth + root_mean * np.sqrt(2 * (1 - delta)) / theta), theta / (2 * mu))
    here = setup(EF21, hyper={"lr": gamma}, rounds=80, uplink=TOP_K)
    executor = InlineExecutor(here)
    _, run_states = play(here, executor)
    minimiser = start(here) - np.mean([gradient(here, i, start(here)) for i in CLIENTS], axis=0) / hessian
    x, found = start(here), []
    for run_state in run_states:
        shifts = [flat(tree.to_tensors(executor.get(run_state.states[i]))["shift"]) for i in CLIENTS]
        error = np.mean([((shifts[i] - gradient(here, i, x)) ** 2).sum() for i in CLIENTS])
        found.append(0.5 * (hessian * (x - minimiser) ** 2).sum() + gamma / theta * error)
        x = flat(run_state.server["params"])
    for before, after in pairwise(found):
        assert after <= (1 - gamma * mu) * before + 1e-9
    assert found[-1] < 1e-4 * found[0]
    stalled = flat(play(setup(DCGD, hyper={"lr": gamma}, rounds=80, uplink=TOP_K))[1][-1].server["params"])
    assert ((stalled - minimiser) ** 2).sum() > 100 * ((x - minimiser) ** 2).sum()


def test_a_share_of_its_own_for_each_client_goes_with_top_k_alone():
    clients = {"retention_ratio": [0.2, 0.5, 1.0]}
    here = setup(EF21, rounds=3, uplink=TOP_K, clients=clients)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    sizes = {row.client: row.uplink_bits for row in records[0].clients}
    assert sizes[0] < sizes[1] < sizes[2]
    assert_shift_is_the_mean(here, executor, run_states)
    with refused(names=["clients.retention_ratio", "EF21", "the same for all"]):
        setup(EF21, uplink=random.RandK(), clients=clients)


def test_feedback_would_count_errors_twice():
    with refused(names=["uplink='feedback'", "EF21", "inside feedback"]):
        setup(EF21, uplink=ErrorFeedback(inner=TOP_K))
    with refused(names=["uplink='lossless'", "EF21", "inside feedback"]):
        setup(EF21, uplink=Lossless(inner=ErrorFeedback(inner=TOP_K)))
    # What goes down is the model, whose difference the engine sends.
    setup(EF21, downlink=ErrorFeedback(inner=TOP_K))


@pytest.mark.parametrize("name", ["ef21", "ef21_bc", "diana", "adiana"])
@pytest.mark.parametrize("absence", [{"per_round": 3}, {"upload_loss": 0.01}], ids=str)
def test_weights_by_samples_need_everyone(name: str, absence: dict[str, Any]):
    kind, examples = find(Method, name), {"weighting": "samples"}
    with refused(
        names=[*(f"clients.{key}" for key in absence), kind.__name__, "weighting='samples'", "weighting='uniform'"]
    ):
        setup(kind, hyper=examples, clients=absence)
    setup(kind, hyper=examples, clients={"per_round": 4})
    setup(kind, clients=absence)
