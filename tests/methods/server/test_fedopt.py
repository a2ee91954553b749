"""FedAdagrad, FedAdam and FedYogi against their equations in numpy, and one step of each by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.methods.shared.optimizers import Adagrad, Adaptive, AdaptiveAdam, Yogi
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.methods.averaging import ABSENCES, ENGINES, Moments, assert_follows, followed, made, wells

KINDS = ("adagrad", "adam", "yogi")
HYPER = {"lr": 0.1, "batch_size": 2, "server_lr": 0.1}


def server_of(hyper: dict[str, Any]) -> Moments:
    """The server in numpy with the paper's defaults: beta1 = 0.9 (Adagrad 0), beta2 = 0.99, tau = 1e-3."""
    kind = hyper["server_optimizer"]
    return Moments(
        kind,
        hyper["server_lr"],
        hyper.get("beta1", 0.0 if kind == "adagrad" else 0.9),
        hyper.get("beta2", 0.99),
        hyper.get("tau", 1e-3),
        raw=hyper.get("second_moment") == "raw",
    )


@pytest.mark.parametrize(
    ("engine", "clients"), [("loop", ABSENCES[0]), *zip(ENGINES, ABSENCES[1:], strict=True)], ids=str
)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"second_moment": "raw", "weighting": "uniform"},
        {"beta1": 0.5, "beta2": 0.7, "tau": 0.1, "epochs": 3, "lr_decay": 0.8},
        {"beta1": 0.8, "tau": 0.3, "second_moment": "raw", "server_lr": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_follows_its_equations(kind: str, hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    hyper = {**HYPER, "server_optimizer": kind, **hyper}
    if kind == "adagrad":
        hyper.pop("beta2", None)
    here = made("fedopt", hyper, rounds=8, engine=engine, clients=clients)
    server = server_of(hyper)
    path = followed(here, server)
    records, run_states = play(here)
    assert_follows(run_states, path, tolerance=2e-5)
    state = run_states[-1].server["optimizer"]
    np.testing.assert_allclose(flat(state["square"]), server.v, rtol=1e-3, atol=1e-7)
    # Our delta is received - trained.
    np.testing.assert_allclose(flat(state["mean"]), -server.m, rtol=1e-3, atol=1e-5)
    up = 320 + (0 if hyper.get("weighting") == "uniform" else 64)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_round_in_closed_form(kind: str):
    # Full-batch steps: delta_i = (1 - (1 - lr h_i)^K) (x - c_i), weighted by examples.
    tau, eta = 0.05, 0.3
    hyper = {"lr": 0.2, "steps": 3, "batch_size": 0, "server_optimizer": kind, "tau": tau, "server_lr": eta}
    here = made("fedopt", hyper, rounds=1)
    curvatures, centres = wells(here)
    x, weights = start(here), np.array([7, 5, 6, 5]) / 23
    g = weights @ ((1 - (1 - 0.2 * curvatures) ** 3) * (x - centres))
    if kind == "adagrad":
        step = g / (np.sqrt(tau**2 + g**2) + tau)
    elif kind == "adam":
        step = 0.1 * g / (np.sqrt(0.99 * tau**2 + 0.01 * (0.1 * g) ** 2) + tau)
    else:
        sign = np.sign(tau**2 - (0.1 * g) ** 2)
        assert set(sign) == {-1.0, 1.0}, "both branches of Yogi have to occur"
        step = 0.1 * g / (np.sqrt(tau**2 - 0.01 * (0.1 * g) ** 2 * sign) + tau)
    (run_state,) = play(here)[1]
    np.testing.assert_allclose(flat(run_state.server["params"]), x - eta * step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "squares"),
    [
        # d: 0.5 * 0 + 0.5 * 4 = 2, then 0.5 * 2 + 0.5 * 0 = 1. v starts at 1.
        (Adagrad(beta1=0.5, tau=1.0), [5.0, 6.0]),
        (Adagrad(beta1=0.5, tau=1.0, second_moment="raw"), [17.0, 17.0]),
        (AdaptiveAdam(beta1=0.5, beta2=0.75, tau=1.0), [0.75 + 1.0, 0.75 * 1.75 + 0.25]),
        (AdaptiveAdam(beta1=0.5, beta2=0.75, tau=1.0, second_moment="raw"), [0.75 + 4.0, 0.75 * 4.75]),
        # v = 1 < 4: up by 0.25 * 4 to 2; then v = 2 > 1: down by 0.25 * 1.
        (Yogi(beta1=0.5, beta2=0.75, tau=1.0), [2.0, 1.75]),
        (Yogi(beta1=0.5, beta2=0.75, tau=1.0, second_moment="raw"), [5.0, 5.0]),
    ],
    ids=str,
)
def test_two_steps_by_hand(optimizer: Adaptive, squares: list[float]):
    params = {"w": torch.tensor([10.0])}
    state, x = optimizer.init(params), 10.0
    assert state["square"]["w"].item() == 1.0
    for gradient, d, v in zip((4.0, 0.0), (2.0, 1.0), squares, strict=True):
        params, state = optimizer.update(params, {"w": torch.tensor([gradient])}, state, 0.5)
        x -= 0.5 * d / (math.sqrt(v) + 1.0)
        assert (state["mean"]["w"].item(), state["square"]["w"].item()) == (d, v)
        assert params["w"].item() == pytest.approx(x, rel=1e-6)


def test_yogi_where_the_moment_is_the_square():
    # sign(0) = 0: v stays.
    optimizer = Yogi(beta1=0.0, tau=2.0)
    params = {"w": torch.tensor([0.0])}
    _, state = optimizer.update(params, {"w": torch.tensor([-2.0])}, optimizer.init(params), 1.0)
    assert state["square"]["w"].item() == 4.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_of_zero_moves_nothing(kind: str):
    optimizer = {"adagrad": Adagrad(), "adam": AdaptiveAdam(), "yogi": Yogi()}[kind]
    params = {"w": torch.tensor([3.0, -1.0])}
    moved, _ = optimizer.update(params, {"w": torch.zeros(2)}, optimizer.init(params), 1.0)
    assert torch.equal(moved["w"], params["w"])


def test_the_penalty_is_added_to_the_gradient():
    one, other = Adagrad(weight_decay=0.5), Adagrad()
    params, gradient = {"w": torch.tensor([2.0])}, {"w": torch.tensor([3.0])}
    with_penalty = one.update(params, gradient, one.init(params), 0.1)[0]["w"]
    assert torch.equal(with_penalty, other.update(params, {"w": torch.tensor([4.0])}, other.init(params), 0.1)[0]["w"])


@pytest.mark.parametrize(("kind", "beta1"), [("adagrad", 0.0), ("adam", 0.9), ("yogi", 0.9)])
def test_the_defaults_are_those_of_the_paper(kind: str, beta1: float):
    method = made("fedopt", {"server_optimizer": kind}).method
    optimizer = method.server_optimizer  # type: ignore[attr-defined]
    assert type(optimizer) is {"adagrad": Adagrad, "adam": AdaptiveAdam, "yogi": Yogi}[kind]
    assert (optimizer.beta1, optimizer.tau, optimizer.second_moment) == (beta1, 1e-3, "momentum")
    assert getattr(optimizer, "beta2", 0.99) == 0.99
