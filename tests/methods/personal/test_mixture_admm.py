"""The mixture's ADMM: its rounds in float64, its fixed point on quadratics, and the conditions on rho and beta."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.sparse import TopK
from rayfl.methods.personal.mixture_admm import MixtureADMM, solved
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, start
from tests.methods.own_models import CLIENTS, MODEL_BITS, common, curvature, made, personal, rounds_of
from tests.population.statuses import with_status
from tests.refusals import refused

EXACT = {"x_step": "closed_form", "cg_iterations": 10}
ABSENCES = ({}, {"per_round": 3}, {"dropout_after_training": 0.3, "upload_loss": 0.2})


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        EXACT,
        {**EXACT, "lam": 0.7, "rho": 1.5, "beta": 0.5, "damping": 0.3},
        {"lr": 0.1, "batch_size": 2, "epochs": 2, "lam": 0.4},
    ],
    ids=str,
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("mixture_admm", hyper, rounds=6, clients=clients)
    given: Any = here.method.hyper
    lam, rho, beta = given.lam, given.rho, hyper.get("beta", given.rho)
    h, b = curvature(here)
    x, z, y = common(here), start(here), np.zeros(10)
    for record, own, state in rounds_of(here):
        there, old = with_status(here.population.sample_round(record.row.round), "delivered"), x.copy()
        for i in there:
            u = 4 * z - sum(old[j] for j in CLIENTS if j != i)
            if given.x_step == "closed_form":
                # h x - b + lam x - y + rho (x - u) = 0.
                best = (b[i] + y + rho * u) / (h[i] + lam + rho)
            else:
                best = old[i]
                for batch in batches(here, record.row.round, i, epochs=given.epochs, batch_size=2):
                    best = best - 0.1 * (batch.gradient(best) + lam * best - y + rho * (best - u))
            x[i] = given.damping * old[i] + (1 - given.damping) * best
        if there:
            z = (rho * x.sum(axis=0) - y) / (rho * 4 - lam)
            y = y + beta * (4 * z - x.sum(axis=0))
        np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(state.server["params"]), z, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(state.server["multiplier"]), y, rtol=1e-5, atol=2e-5)
        bits = {(row.uplink_bits, row.downlink_bits) for row in record.clients if row.client in there}
        assert bits <= {(MODEL_BITS, 2 * MODEL_BITS)}


@pytest.mark.parametrize("uplink", [None, TopK(keep_ratio=0.5)], ids=["dense", "topk"])
def test_the_fixed_point_is_the_minimiser_of_the_mixture(uplink: TopK | None):
    # h_i x_i - b_i + lam (x_i - xbar) = 0, so x_i = (b_i + lam xbar) / (h_i + lam), with xbar the mean of these;
    # z = xbar and y = lam xbar. A lossy uplink only takes longer.
    lam = 0.5
    hyper = {**EXACT, "lam": lam, "rho": 0.6, "mu": 0.5}
    here = made("mixture_admm", hyper, rounds=20 if uplink is None else 30, uplink=uplink)
    end = play(here)[1][-1]
    h, b = curvature(here)
    mean = (b / (h + lam)).sum(axis=0) / (4 - (lam / (h + lam)).sum(axis=0))
    x = (b + lam * mean) / (h + lam)
    np.testing.assert_allclose(personal(here, end), x, atol=1e-4)
    np.testing.assert_allclose(flat(end.server["params"]), x.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(flat(end.server["multiplier"]), lam * x.mean(axis=0), atol=1e-4)
    assert np.abs(x - x.mean(axis=0)).max() > 0.3


def test_conjugate_gradients_solve_a_system_that_is_not_diagonal():
    draw = torch.Generator().manual_seed(0)
    root = torch.randn((6, 6), generator=draw)
    matrix, right = root @ root.T + torch.eye(6), torch.randn(6, generator=draw)
    found = solved(lambda v: {"w": matrix @ v["w"]}, {"w": right}, 20)["w"]
    np.testing.assert_allclose(found.numpy(), np.linalg.solve(matrix.numpy(), right.numpy()), atol=1e-4)
    assert solved(lambda v: v, {"w": torch.zeros(3)}, 5)["w"].tolist() == [0.0, 0.0, 0.0]


def test_the_conditions_on_rho_and_beta():
    with refused(names=["beta=2", "rho=1"]):
        MixtureADMM.Hyper(beta=2.0)
    with refused(names=["rho=0.1", "4 clients", "lam=0.4", "above 0.1"]):
        made("mixture_admm", {"rho": 0.1, "lam": 0.4})
    # 1.5 (0.4 + 0.16 / 0.2) = 1.8, a quarter of which is 0.45.
    with refused(names=["at least 1.5", "1.8", "0.45"]):
        made("mixture_admm", {"rho": 0.44, "lam": 0.4, "mu": 0.2})
    made("mixture_admm", {"rho": 0.45, "lam": 0.4, "mu": 0.2})
    with refused(names=["steps=3", "x_step='closed_form'"]):
        MixtureADMM.Hyper(x_step="closed_form", steps=3)
