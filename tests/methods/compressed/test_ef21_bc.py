"""EF21-BC against its equations in float64, its fixed point, and the bill of who missed broadcasts."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.base import Compressor
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.methods.compressed.ef21_bc import EF21BC
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.contracts.seams.quadratic import Quadratic, setup
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
    server_draws,
    top_k,
)
from tests.population.statuses import with_status
from tests.refusals import refused

TOP_K = TopK(keep_ratio=RATIO)
BOTH = {"topk": (TOP_K, top_k, 1.0), "randk": (RandK(), rand_k, RATIO)}
"""A compressor, its twin in numpy, and the factor that makes a contraction of it."""


def followed(method: EF21BC, here: Setup, up: str, down: str) -> dict[str, list[np.ndarray]]:
    """x, w and G after every round, by the equations."""
    (_, compress, factor), (_, compress_down, factor_down) = BOTH[up], BOTH[down]
    x, shifts, w = start(here), np.zeros((4, 10)), np.zeros(10)
    seen: dict[str, list[np.ndarray]] = {"params": [], "known": [], "shift": []}
    for round in range(here.rounds):
        if round:
            w = w + factor_down * compress_down(shifts.mean(axis=0) - w, server_draws(here, round))
        x = x - method.hyper.lr * method.hyper.lr_decay**round * w
        for i in with_status(here.population.sample_round(round), "delivered"):
            difference = gradient(here, i, x, method.hyper.l2) - shifts[i]
            shifts[i] = shifts[i] + factor * compress(difference, draws(here, round, i))
        for name, value in (("params", x), ("known", w), ("shift", shifts.mean(axis=0))):
            seen[name].append(value)
    return seen


@pytest.mark.parametrize(("up", "down"), [("topk", "topk"), ("randk", "topk"), ("topk", "randk")])
@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({"l2": 0.5, "lr_decay": 0.95}, {}),
        ({}, {"per_round": 2, "dropout_after_training": 0.2, "dropout_before_download": 0.2, "upload_loss": 0.2}),
    ],
    ids=["everyone", "absent"],
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any], up: str, down: str):
    method = EF21BC(Quadratic(), EF21BC.Hyper(**{"lr": 0.15, **hyper}))
    here = setup(method, rounds=12, uplink=BOTH[up][0], downlink=BOTH[down][0], clients=clients)
    executor = InlineExecutor(here)
    run_states = play(here, executor)[1]
    for name, expected in followed(method, here, up, down).items():
        assert_follows(run_states, name, expected)
    assert_shift_is_the_mean(here, executor, run_states)


def test_at_the_fixed_point_everything_known_is_zero_though_clients_differ():
    here = setup(EF21BC, hyper={"lr": 0.2}, rounds=80, uplink=TOP_K, downlink=TOP_K)
    server = play(here)[1][-1].server
    gradients = np.array([gradient(here, i, flat(server["params"])) for i in CLIENTS])
    assert np.linalg.norm(gradients, axis=1).min() > 0.5
    for value in (gradients.mean(axis=0), flat(server["shift"]), flat(server["known"])):
        assert np.linalg.norm(value) < 1e-5


def test_uncompressed_it_is_gradient_descent_one_round_later():
    here = setup(EF21BC, hyper={"lr": 0.3}, rounds=10)
    x, expected = start(here), [start(here)]
    for _ in range(9):
        x = x - 0.3 * np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
        expected.append(x)
    records, run_states = play(here)
    assert_follows(run_states, "params", expected)
    assert bits(records) == [{(DENSE_BITS, 0)}] + [{(DENSE_BITS, DENSE_BITS)}] * 9


@pytest.mark.parametrize("downlink", [RandK(), None], ids=["randk", "dense"])
def test_who_was_away_is_billed_what_it_missed_or_x_and_w(downlink: Compressor | None):
    clients = {"per_round": 1, "dropout_before_download": 0.2, "dropout_after_training": 0.2}
    here = setup(EF21BC, rounds=40, downlink=downlink, clients=clients)
    size, had, capped = DENSE_BITS if downlink is None else SPARSE_BITS, dict.fromkeys(CLIENTS, 0), 0
    for round, record in enumerate(play(here)[0]):
        for row in record.clients:
            if row.status == "dropped_before_download":
                assert row.downlink_bits == 0
                continue
            # Nothing goes down in round 0, so a client that never came lacks the steps of all rounds but that.
            missing = (round - had[row.client]) * size
            assert row.downlink_bits == min(missing, 2 * DENSE_BITS), (round, row)
            had[row.client], capped = round, capped + (missing > 2 * DENSE_BITS)
    assert capped


@pytest.mark.parametrize("key", ["uplink", "downlink"])
def test_feedback_is_refused_both_ways(key: str):
    feedback: Any = {key: ErrorFeedback(inner=TOP_K)}
    with refused(names=[f"{key}='feedback'", "EF21BC", "inside feedback"]):
        setup(EF21BC, **feedback)
