"""L2GD against its iteration in float64, its bits by the coin, and the minimiser of the mixture."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.dense import Dense
from rayfl.determinism import seeding
from rayfl.methods.personal.l2gd import L2GD
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.methods.convex import RandK
from tests.methods.own_models import CLIENTS, MODEL_BITS, common, curvature, made, personal, rounds_of
from tests.refusals import refused

HYPERS = (
    {"alpha": 0.8, "lam": 0.5, "p": 0.5},
    {"alpha": 1.0, "lam": 0.3, "p": 0.6, "batch_size": 2},
    {"alpha": 0.4, "lam": 2.0, "p": 0.4},
)


@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize("seed", [1, 3, 8])
def test_follows_the_iteration(hyper: dict[str, Any], seed: int):
    here = made("l2gd", hyper, rounds=14, seed=seed)
    alpha, lam, p = (hyper[name] for name in ("alpha", "lam", "p"))
    beta, gam = alpha / (4 * (1 - p)), alpha * lam / (4 * p)
    x, last, exchanges = common(here), True, 0
    for record, own, state in rounds_of(here):
        round = record.row.round
        mean = seeding.coin(seed, round) < p
        exchanged = mean and not last
        if mean:
            average = x.mean(axis=0)
            x = (1 - gam) * x + gam * average
            if exchanged:
                np.testing.assert_allclose(flat(state.server["params"]), average, rtol=1e-5, atol=1e-5)
        else:
            for i in CLIENTS:
                (batch,) = batches(here, round, i, steps=1, batch_size=hyper.get("batch_size") or None)  # pyright: ignore[reportArgumentType]
                x[i] = x[i] - beta * batch.gradient(x[i])
        np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-5)
        # Communication on a 0 -> 1 switch only, and never before the first gradient step.
        assert {(row.uplink_bits, row.downlink_bits) for row in record.clients} == {
            (MODEL_BITS, MODEL_BITS) if exchanged else (0, 0)
        }
        exchanges, last = exchanges + exchanged, mean
    assert exchanges > 0


def test_steps_to_the_mean_keep_the_mean():
    here = made("l2gd", {"alpha": 0.4, "lam": 0.5, "p": 0.6}, rounds=20)
    before = start(here)
    for record, own, _ in rounds_of(here):
        if seeding.coin(here.seed, record.row.round) < 0.6:
            np.testing.assert_allclose(own.mean(axis=0), before, atol=2e-6)
        before = own.mean(axis=0)


def test_the_expected_step_is_the_gradient_of_the_mixture():
    # At the minimiser h_i x_i - b_i + lam (x_i - xbar) = 0, so x_i = (b_i + lam xbar) / (h_i + lam), xbar their mean.
    # There (1 - p) beta grad f_i(x_i) + p gam (x_i - xbar) = (alpha / n) (grad f_i + lam (x_i - xbar)) is 0.
    alpha, lam, p = 0.2, 1.3, 0.4
    hyper = L2GD.Hyper(alpha=alpha, lam=lam, p=p)
    h, b = curvature(made("l2gd", {}))
    mean = (b / (h + lam)).sum(axis=0) / (4 - (lam / (h + lam)).sum(axis=0))
    x = (b + lam * mean) / (h + lam)
    np.testing.assert_allclose(x.mean(axis=0), mean, atol=1e-12)
    step = (1 - p) * hyper.beta(4) * (h * x - b) + p * hyper.gam(4) * (x - mean)
    np.testing.assert_allclose(step, 0, atol=1e-12)
    # And elsewhere it is alpha / n times that gradient.
    elsewhere = x + 1
    step = (1 - p) * hyper.beta(4) * (h * elsewhere - b) + p * hyper.gam(4) * (elsewhere - elsewhere.mean(axis=0))
    np.testing.assert_allclose(step, alpha / 4 * h, atol=1e-12)


@pytest.mark.parametrize("clients", [{"per_round": 2}, {"dropout_after_training": 0.4, "upload_loss": 0.2}], ids=str)
def test_who_was_away_gets_the_mean_before_its_next_step(clients: dict[str, Any]):
    p, gam, beta = 0.7, 0.2 / (4 * 0.7), 0.5 / (4 * 0.3)
    here = made("l2gd", {"alpha": 0.5, "lam": 0.4, "p": p}, rounds=30, clients=clients)
    x, average, behind, caught_up = common(here), start(here), set(), 0
    last = True
    for record, own, _ in rounds_of(here):
        round = record.row.round
        mean = seeding.coin(here.seed, round) < p
        exchanged, last = mean and not last, mean
        at_work = [row.client for row in record.clients if row.status in ("delivered", "silent")]
        if not mean:
            for i in at_work:
                x[i] = x[i] - beta * points(here, i).gradient(x[i])
        elif exchanged:
            if at_work:
                average = x[at_work].mean(axis=0)
                behind = (behind | set(CLIENTS)) - set(at_work)
            for i in at_work:
                x[i] = (1 - gam) * x[i] + gam * average
        else:
            known = [row.client for row in record.clients if row.client in behind and row.status == "silent"]
            assert all(row.downlink_bits == MODEL_BITS for row in record.clients if row.client in known)
            caught_up += len(known)
            behind -= set(known)
            for i in at_work:
                x[i] = (1 - gam) * x[i] + gam * average
        np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-5, err_msg=str(round))
    assert caught_up


def test_compressed_l2gd_sends_the_models_themselves_through_both_compressors():
    # Half precision down is seen to the digit; rand-k up costs its bits in every exchange.
    hyper = {"alpha": 0.8, "lam": 0.5, "p": 0.5}
    half = made("l2gd", hyper, rounds=14, downlink=Dense(dtype="fp16"))
    own = personal(half, play(half)[1][-1], "average")
    np.testing.assert_array_equal(own, own.astype(np.float16).astype(np.float64))
    sparse = made("l2gd", hyper, rounds=14, uplink=RandK())
    bits = {row.uplink_bits for record in play(sparse)[0] for row in record.clients}
    assert bits == {0, 8 * (3 * 4 + 2 + 1 * 4 + 2)}


def test_the_bound_on_gam():
    # gam = alpha lam / (n p) = 1 * 0.3 / (4 * 0.1) = 0.75.
    with refused(names=["method.alpha=1", "lam=0.3", "p=0.1", "n=4", "at most 0.5", "lower alpha to 0.6667"]):
        made("l2gd", {"lam": 0.3})
    made("l2gd", {"lam": 0.2})
