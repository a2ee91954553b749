"""FedNova against its equations in numpy, its norms in closed form, and where it goes when FedAvg goes elsewhere."""

from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import find
from rayfl.errors import ClientError
from rayfl.methods.base import Method
from rayfl.methods.server.fednova import FedNova
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.methods.averaging import ABSENCES, assert_follows, made, optima, rate, share, train_batches, wells
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
UNEQUAL = {"examples_per_s": [100.0, 100.0, 10.0, 5.0], "work": "capacity"}
"""Their speeds over the median, 55: with `steps` = 8 the clients take 8, 8, 1 and 1 steps."""


def impulses(num_steps: int, momentum: float, nesterov: bool, pull: float) -> np.ndarray:
    """How far each step's gradient alone moves the end of the training, in learning rates, [num_steps]."""
    moved, velocity = np.zeros(num_steps), np.zeros(num_steps)
    for step in range(num_steps):
        gradient = np.eye(num_steps)[step] - pull * moved
        velocity = momentum * velocity + gradient
        moved = moved + (gradient + momentum * velocity if nesterov else velocity)
    return moved


def normalised(here: Setup, mu: float, momentum: float, nesterov: bool, by_steps: bool) -> list[np.ndarray]:
    """x after every round: each client's change over the sum of its impulses, and their effective number of steps."""
    x, v, path, server = start(here), np.zeros(10), [], here.method.hyper.model_dump()
    for round in range(here.rounds):
        delivered, lr = with_status(here.population.sample_round(round), "delivered"), rate(here, round)
        directions, counts = [], []
        for client in delivered:
            y, velocity, stream = x, np.zeros(10), train_batches(here, round, client)
            for batch in stream:
                gradient = batch.gradient(y) + mu * (y - x)
                velocity = momentum * velocity + gradient
                y = y - lr * (gradient + momentum * velocity if nesterov else velocity)
            norm = np.abs(impulses(len(stream), momentum, nesterov, lr * mu)).sum()
            directions.append((x - y) / norm)
            counts.append(len(stream) if by_steps else norm)
        if delivered:
            p = np.array([share(here, client) for client in delivered])
            p /= p.sum()
            v = server["server_momentum"] * v + (p @ counts) * (p @ directions)
            x = x - server["server_lr"] * v
        path.append(x)
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    ("hyper", "by_steps"),
    [
        ({"epochs": 2}, False),
        ({"momentum": 0.6, "weighting": "uniform", "lr_decay": 0.8}, False),
        ({"momentum": 0.5, "mu": 0.7, "epochs": 2}, True),
        ({"optimizer": "nesterov", "momentum": 0.4, "epochs": 2}, False),
        ({"mu": 0.7, "optimizer": "nesterov", "momentum": 0.4}, True),
        ({"server_momentum": 0.7, "server_lr": 0.5, "epochs": 2}, False),
    ],
    ids=str,
)
def test_follows_its_equations(hyper: dict[str, Any], by_steps: bool, clients: dict[str, Any]):
    here = made("fednova", {**HYPER, **hyper}, rounds=4, clients=clients)
    nesterov = hyper.get("optimizer") == "nesterov"
    records, run_states = play(here)
    assert_follows(run_states, normalised(here, hyper.get("mu", 0), hyper.get("momentum", 0), nesterov, by_steps))
    # The direction, 4 bytes for a_i or tau_i, and 8 for a number of examples.
    up = 320 + 32 + (0 if hyper.get("weighting") == "uniform" else 64)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


def test_norms_in_closed_form():
    # Momentum: [tau - r (1 - r^tau) / (1 - r)] / (1 - r). Proximal: (1 - (1 - eta mu)^tau) / (eta mu).
    assert FedNova(momentum=0.9).norm(5, 0.1) == pytest.approx((5 - 0.9 * (1 - 0.9**5) / 0.1) / 0.1)
    assert FedNova(momentum=0.9).norm(5, 0.1) == pytest.approx(13.1441)
    assert FedNova(mu=0.5).norm(5, 0.1) == pytest.approx((1 - 0.95**5) / 0.05)
    assert FedNova(mu=0.5).norm(5, 0.1) == pytest.approx(4.52438, abs=5e-6)
    assert FedNova().norm(7, 0.1) == 7


def test_clients_with_unequal_steps_do_not_move_the_minimum():
    """With full batches a client's tau steps shrink x - c_i by (1 - lr h_i)^tau, so its delta is b_i (x - c_i).

    FedAvg stops where sum b_i (x - c_i) = 0, FedNova where sum b_i / tau_i (x - c_i) = 0, and the minimum has h_i.
    """
    lr, tau = 0.04, np.array([8, 8, 1, 1])[:, None]
    hyper = {"lr": lr, "steps": 8, "batch_size": 0, "weighting": "uniform"}
    h, c = wells(made("fednova", hyper))
    b = 1 - (1 - lr * h) ** tau
    minimum = optima(h, c, np.ones(4))
    stops = {"fedavg": optima(b, c, np.ones(4)), "fednova": optima(b / tau, c, np.ones(4))}
    away = {name: np.linalg.norm(stop - minimum) for name, stop in stops.items()}
    assert away["fedavg"] > 10 * away["fednova"]
    for name, stop in stops.items():
        here = made(name, hyper, rounds=75, clients=UNEQUAL)
        np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), stop, atol=1e-4)


@pytest.mark.parametrize("hyper", [{}, {"momentum": 0.5}], ids=str)
def test_with_equal_steps_it_is_fedavg(hyper: dict[str, Any]):
    settings = {**HYPER, **hyper, "steps": 3}
    plain, other = (play(made(name, settings, clients=ABSENCES[1]))[1] for name in ("fedavg", "fednova"))
    for one, two in zip(plain, other, strict=True):
        np.testing.assert_allclose(flat(one.server["params"]), flat(two.server["params"]), rtol=1e-5, atol=1e-6)


def test_an_optimizer_without_a_norm_is_refused():
    with refused(names=["optimizer='adam'", "'sgd'", "'nesterov'"]):
        find(Method, "fednova").Hyper(optimizer="adam")


def test_a_proximal_term_that_turns_the_training_round_is_refused():
    # y - x is 1, then 1 + (1 - lr mu) = 0 learning rates.
    with refused(names=["client 0", "mu=20", "lr=0.1", "2 steps"], error=ClientError):
        play(made("fednova", {"lr": 0.1, "mu": 20.0, "steps": 2}))
