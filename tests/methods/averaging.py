"""FedAvg's relatives in numpy, on quadratics: any local step, any server step, any weights, who arrives.

Nothing of rayfl computes here but the draws that both sides must share: who takes part, and the order of the batches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from tests.contracts.seams.closed_form import Points, batches, flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.population.statuses import with_status

ENGINES = ("loop", "vmap")
ABSENCES = (
    {},
    {"per_round": 3},
    {"per_round": 2, "dropout_before_download": 0.2, "dropout_after_training": 0.3},
)
"""Who is missing: nobody, one at random, and enough that some rounds are empty."""

Direction = Callable[[Points, np.ndarray, np.ndarray], np.ndarray]
"""What a local step moves against, given a batch, y and the received x."""
Factors = Callable[[int, np.ndarray], np.ndarray]
"""What multiplies a round's averaged delta, given the round and x."""


class Server:
    """x <- x - eta_g delta, FedAvg's; subclasses have other rules."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = lr

    def step(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
        return x - self.lr * delta


class HeavyBall(Server):
    """v <- beta v + delta; x <- x - eta_g v."""

    def __init__(self, lr: float, beta: float) -> None:
        super().__init__(lr)
        self.beta, self.v = beta, np.zeros(10)

    def step(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.v = self.beta * self.v + delta
        return x - self.lr * self.v


class Moments(Server):
    """FedAdagrad, FedAdam and FedYogi in the paper's sign: Delta points to where clients went, and x is added to."""

    def __init__(self, kind: str, lr: float, beta1: float, beta2: float, tau: float, raw: bool = False) -> None:
        super().__init__(lr)
        self.kind, self.beta1, self.beta2, self.tau, self.raw = kind, beta1, beta2, tau, raw
        self.m, self.v = np.zeros(10), np.full(10, tau**2)

    def step(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.m = self.beta1 * self.m + (1 - self.beta1) * -delta
        square = delta**2 if self.raw else self.m**2
        if self.kind == "adagrad":
            self.v = self.v + square
        elif self.kind == "adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * square
        else:
            self.v = self.v - (1 - self.beta2) * square * np.sign(self.v - square)
        return x + self.lr * self.m / (np.sqrt(self.v) + self.tau)


def gradient(batch: Points, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """FedAvg's direction."""
    return batch.gradient(y)


def proximal(mu: float) -> Direction:
    """FedProx's direction."""
    return lambda batch, y, x: batch.gradient(y) + mu * (y - x)


def untouched(round: int, x: np.ndarray) -> np.ndarray:
    """No rescaling."""
    return np.ones(10)


def share(here: Setup, client: int) -> float:
    """A client's weight before it is divided by everyone's."""
    return 1.0 if here.method.hyper.model_dump()["weighting"] == "uniform" else float(TRAIN[client])


def train_batches(here: Setup, round: int, client: int) -> list[Points]:
    """What the client trains on in a round, as the hyper-parameters say."""
    hyper = here.method.hyper.model_dump()
    epochs = None if hyper["steps"] else hyper["epochs"] or 1
    size = hyper["batch_size"] or TRAIN[client]
    return batches(here, round, client, epochs=epochs, steps=hyper["steps"], batch_size=size)


def rate(here: Setup, round: int) -> float:
    """The clients' learning rate of a round."""
    hyper = here.method.hyper.model_dump()
    return hyper["lr"] * hyper["lr_decay"] ** round


def followed(
    here: Setup, server: Server, direction: Direction = gradient, factors: Factors = untouched
) -> list[np.ndarray]:
    """x after every round: local steps, the mean over those who delivered, the server's step where anyone did."""
    x, path = start(here), []
    for round in range(here.rounds):
        delivered, ends = with_status(here.population.sample_round(round), "delivered"), []
        for client in delivered:
            y = x
            for batch in train_batches(here, round, client):
                y = y - rate(here, round) * direction(batch, y, x)
            ends.append(y)
        if ends:
            delta = x - np.average(ends, axis=0, weights=[share(here, client) for client in delivered])
            x = server.step(x, factors(round, x) * delta)
        path.append(x)
    return path


def scaffolded(here: Setup, factors: Factors = untouched) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """SCAFFOLD's x, c and all c_i after every round, in the paper's signs: dx_i = y - x, dc_i = c_i+ - c_i."""
    hyper, x, c, own, seen = here.method.hyper.model_dump(), start(here), np.zeros(10), np.zeros((4, 10)), []
    decay = hyper["weight_decay"]
    for round in range(here.rounds):
        delivered, dx, dc, lr = with_status(here.population.sample_round(round), "delivered"), [], [], rate(here, round)
        for i in delivered:
            y, stream = x, train_batches(here, round, i)
            for batch in stream:
                y = y - lr * (batch.gradient(y) + decay * y - own[i] + c)
            new = own[i] - c + (x - y) / (len(stream) * lr)
            if hyper["option"] == "I":
                size = hyper["control_batch_size"] or TRAIN[i]
                (batch,) = batches(here, round, i, "control", steps=1, batch_size=size)
                new = batch.gradient(x) + decay * x
            dx.append(y - x)
            dc.append(new - own[i])
            own[i] = new
        if delivered:
            mean = np.average(dx, axis=0, weights=[share(here, i) for i in delivered])
            x = x + hyper["server_lr"] * factors(round, x) * mean
            c = c + len(delivered) / 4 * np.mean(dc, axis=0)
        seen.append((x, c, own.copy()))
    return seen


def made(name: str, hyper: Mapping[str, Any], **options: Any) -> Setup:
    """A registered method on the quadratics."""
    kind = find(Method, name)
    return setup(kind(Quadratic(), kind.Hyper(**hyper)), **options)


def optima(curvatures: np.ndarray, centres: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """argmin sum_i w_i h_i (x - c_i)^2, entry by entry; arguments [num_clients, 10], weights [num_clients]."""
    weighed = weights[:, None] * curvatures
    return (weighed * centres).sum(axis=0) / weighed.sum(axis=0)


def wells(here: Setup) -> tuple[np.ndarray, np.ndarray]:
    """Curvatures and centres [4, 10] of the clients' losses, f_i = 0.5 h (x - c)^2 but for a constant."""
    clients = [points(here, client) for client in range(4)]
    curvatures = np.stack([client.hessian() for client in clients])
    return curvatures, np.stack([(client.a * client.c).mean(axis=0) / client.hessian() for client in clients])


def assert_follows(run_states: list[RunState], path: list[np.ndarray], tolerance: float = 5e-6) -> None:
    """The global model after every round, to float32; and it has moved."""
    np.testing.assert_allclose(
        [flat(run_state.server["params"]) for run_state in run_states], path, rtol=1e-5, atol=tolerance
    )
    assert np.abs(path[-1] - path[0]).max() > 1e-2
