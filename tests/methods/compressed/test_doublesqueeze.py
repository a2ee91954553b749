"""DoubleSqueeze against its equations in float64, its identity, and the bill of who missed broadcasts."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.compress import random
from rayfl.compress.base import Compressor
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sign import ScaledSign
from rayfl.compress.sparse import TopK
from rayfl.methods.compressed.doublesqueeze import DoubleSqueeze
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.run_state import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.convex import (
    CLIENTS,
    DENSE_BITS,
    RATIO,
    SPARSE_BITS,
    RandK,
    assert_follows,
    draws,
    gradient,
    rand_k,
    server_draws,
    top_k,
)
from tests.population.statuses import with_status
from tests.refusals import refused

TOP_K = TopK(keep_ratio=RATIO)
BOTH = {"topk": (TOP_K, top_k, 1.0), "randk": (RandK(), rand_k, RATIO)}
"""A compressor, its twin in numpy, and the factor that makes a contraction of it."""


def errors(executor: InlineExecutor, run_state: RunState) -> dict[int, np.ndarray]:
    """e_i of the clients that were there."""
    return {i: flat(tree.to_tensors(executor.get(ref))["error"]) for i, ref in run_state.states.items()}


def followed(method: DoubleSqueeze, here: Setup, up: str, down: str) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """x after every round, and v = e + mean_i c_i of what goes down next, by the equations; and the last e_i."""
    (_, compress, factor), (_, compress_down, factor_down) = BOTH[up], BOTH[down]
    weights = TRAIN if method.hyper.weighting == "samples" else [1] * 4
    x, e, own, v = start(here), np.zeros(10), np.zeros((4, 10)), np.zeros(10)
    seen: dict[str, list[np.ndarray]] = {"params": [], "step": []}
    for round in range(here.rounds):
        if round:
            c = factor_down * compress_down(v, server_draws(here, round))
            x, e = x - c, v - c
        sent, there = [], with_status(here.population.sample_round(round), "delivered")
        for i in there:
            v_i = method.hyper.lr * method.hyper.lr_decay**round * gradient(here, i, x, method.hyper.l2) + own[i]
            sent.append(factor * compress(v_i, draws(here, round, i)))
            own[i] = v_i - sent[-1]
        v = e + np.average(sent, axis=0, weights=[weights[i] for i in there]) if there else e
        seen["params"].append(x)
        seen["step"].append(v)
    return seen, own


@pytest.mark.parametrize(("up", "down"), [("topk", "topk"), ("randk", "topk"), ("topk", "randk")])
@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({"l2": 0.5, "lr_decay": 0.95, "weighting": "samples"}, {}),
        ({}, {"per_round": 2, "dropout_after_training": 0.2, "dropout_before_download": 0.2, "upload_loss": 0.2}),
    ],
    ids=["everyone", "absent"],
)
def test_follows_algorithm_1(hyper: dict[str, Any], clients: dict[str, Any], up: str, down: str):
    method = DoubleSqueeze(Quadratic(), DoubleSqueeze.Hyper(**{"lr": 0.15, **hyper}))
    here = setup(method, rounds=12, uplink=BOTH[up][0], downlink=BOTH[down][0], clients=clients)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    seen, own = followed(method, here, up, down)
    for name, expected in seen.items():
        assert_follows(run_states, name, expected)
    # A lost upload, or one that was not sent, leaves e_i as it was.
    for i, error in errors(executor, run_states[-1]).items():
        np.testing.assert_allclose(error, own[i], atol=5e-6)
    assert not clients or "upload_lost" in {row.status for record in records for row in record.clients}


@pytest.mark.parametrize(
    ("up", "down"), [(TOP_K, RandK()), (ScaledSign(), TOP_K), (RandK(), ScaledSign())], ids=["topk", "sign", "randk"]
)
def test_nothing_is_lost_between_both_ends(up: Compressor, down: Compressor):
    """x - v - mean_i e_i moves by -gamma mean_i grad f_i(x), whatever the compressors do, and v goes down next."""
    here = setup(DoubleSqueeze, hyper={"lr": 0.2, "lr_decay": 0.9}, rounds=12, uplink=up, downlink=down)
    executor = InlineExecutor(here)
    virtual, moved = start(here), 0.0
    for round, run_state in enumerate(play(here, executor)[1]):
        x = flat(run_state.server["params"])
        virtual = virtual - 0.2 * 0.9**round * np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        own = np.mean([*errors(executor, run_state).values()], axis=0)
        np.testing.assert_allclose(x - flat(run_state.server["step"]) - own, virtual, atol=5e-6)
        moved = max(moved, np.abs(own).max())
    assert moved > 0.05


def test_uncompressed_it_is_gradient_descent_one_round_later():
    here = setup(DoubleSqueeze, hyper={"lr": 0.3}, rounds=10)
    x, expected = start(here), [start(here)]
    for _ in range(9):
        x = x - 0.3 * np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        expected.append(x)
    assert_follows(play(here)[1], "params", expected)


@pytest.mark.parametrize("clients", [{}, {"per_round": 2, "upload_loss": 0.2}], ids=["everyone", "absent"])
def test_fedavg_with_feedback_both_ways_is_the_same_for_one_step(clients: dict[str, Any]):
    ours = setup(DoubleSqueeze, hyper={"lr": 0.2}, rounds=10, uplink=TOP_K, downlink=TOP_K, clients=clients)
    around, hyper = ErrorFeedback(inner=TOP_K), {"lr": 0.2, "steps": 1, "batch_size": 0, "weighting": "uniform"}
    other = setup(FedAvg, hyper=hyper, rounds=10, uplink=around, downlink=around, clients=clients)
    for one, two in zip(play(ours)[1], play(other)[1], strict=True):
        # What clients hold there is x here.
        np.testing.assert_allclose(flat(one.server["params"]), flat(two.downlink["held"]["model"]), atol=5e-6)


def test_who_was_away_is_billed_what_it_missed_or_x():
    clients = {"per_round": 2, "dropout_before_download": 0.2, "dropout_after_training": 0.2}
    here = setup(DoubleSqueeze, rounds=20, uplink=RandK(), downlink=RandK(), clients=clients)
    had, late = dict.fromkeys(CLIENTS, 0), set[int]()
    for round, record in enumerate(play(here)[0]):
        for row in record.clients:
            assert row.uplink_bits == (SPARSE_BITS if row.status == "delivered" else 0)
            if row.status == "dropped_before_download":
                continue
            late.add(missing := round - had[row.client])
            assert row.downlink_bits == min(missing * SPARSE_BITS, DENSE_BITS), (round, row)
            had[row.client] = round
    assert {1, 2, 3} <= late


def test_what_would_remember_twice_is_refused():
    for key in ("uplink", "downlink"):
        feedback: Any = {key: ErrorFeedback(inner=TOP_K)}
        with refused(names=[f"{key}='feedback'", "DoubleSqueeze", "inside feedback"]):
            setup(DoubleSqueeze, **feedback)
    with refused(names=["clients.retention_ratio", "DoubleSqueeze", "the same for all"]):
        setup(DoubleSqueeze, uplink=random.RandK(), clients={"retention_ratio": [0.2, 0.5]})
