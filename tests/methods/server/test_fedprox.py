"""FedProx against its equations in numpy, its local steps in closed form, and FedAvg where it is FedAvg."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.sign import ScaledSign
from rayfl.data.batches import Batch
from rayfl.methods.base import Stage
from rayfl.methods.server.fedprox import FedProx
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.contracts.seams.quadratic import Quadratic
from tests.methods.averaging import ABSENCES, ENGINES, Server, assert_follows, followed, made, proximal, wells

HYPER = {"lr": 0.1, "batch_size": 2}


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"mu": 1.0}, {"mu": 0.3, "epochs": 3, "weighting": "uniform", "lr_decay": 0.8}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    here = made("fedprox", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    records, run_states = play(here)
    assert_follows(run_states, followed(here, Server(), proximal(hyper["mu"])))
    up = 320 + (0 if hyper.get("weighting") == "uniform" else 64)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


def test_two_steps_by_hand():
    # a = 1, c = 0, lr = 0.1, mu = 2. At x = 1 there is no pull: y = 1 - 0.1 * 1 = 0.9.
    # Then y = 0.9 - 0.1 (0.9 + 2 (0.9 - 1)) = 0.9 - 0.1 * 0.7 = 0.83.
    method = FedProx(Quadratic(), FedProx.Hyper(lr=0.1, mu=2.0))
    sample = torch.stack([torch.zeros(10), torch.ones(10)])
    batch, stage = Batch(sample[None], torch.zeros(1, dtype=torch.int64)), Stage(lr=0.1)
    carry = method.start({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    for value in (0.9, 0.83):
        carry = method.step(carry, batch, stage=stage)
        np.testing.assert_allclose(flat(carry["params"]), np.full(10, value), rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 400])
def test_one_round_in_closed_form(steps: int):
    # y <- y - lr (h (y - c) + mu (y - x)) goes to z = (h c + mu x) / (h + mu), as (1 - lr (h + mu))^K (x - z) to 0.
    mu, lr = 0.7, 0.2
    here = made("fedprox", {"lr": lr, "steps": steps, "batch_size": 0, "mu": mu}, rounds=1)
    h, c = wells(here)
    x, weights = start(here), np.array([7, 5, 6, 5]) / 23
    z = (h * c + mu * x) / (h + mu)
    ends = z + (1 - lr * (h + mu)) ** steps * (x - z)
    np.testing.assert_allclose(flat(play(here)[1][0].server["params"]), weights @ ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_without_the_term_it_is_fedavg(clients: dict[str, Any]):
    plain = play(made("fedavg", {**HYPER, "momentum": 0.5}, clients=clients))[1]
    other = play(made("fedprox", {**HYPER, "momentum": 0.5, "mu": 0.0}, clients=clients))[1]
    for one, two in zip(plain, other, strict=True):
        assert flat(one.server["params"]).tolist() == flat(two.server["params"]).tolist()


def test_the_anchor_is_the_model_that_came_down():
    # Round 1 sends the sign of x^1 - x^0 and its mean magnitude. The first step has no pull, and a mu of 900 keeps y
    # near what was received, not near x^1.
    here = made("fedprox", {"lr": 1e-3, "steps": 50, "batch_size": 0, "mu": 900.0}, rounds=2, downlink=ScaledSign())
    first, second = (flat(one.server["params"]).astype(np.float64) for one in play(here)[1])
    received, moved = start(here).astype(np.float64), first - start(here)
    for tensor in (slice(0, 8), slice(8, 10)):
        received[tensor] += np.sign(moved[tensor]) * np.abs(moved[tensor]).mean()
    assert np.abs(received - first).max() > 1e-4
    h, c = wells(here)
    z = (h * c + 900.0 * received) / (h + 900.0)
    ends = z + (1 - 1e-3 * (h + 900.0)) ** 50 * (received - z)
    # delta is received - trained, and the server takes it from its own x.
    expected = first - (np.array([7, 5, 6, 5]) / 23) @ (received - ends)
    np.testing.assert_allclose(second, expected, atol=1e-6)


def test_the_default_is_ours():
    assert made("fedprox", {}).method.hyper.model_dump()["mu"] == 0.01
