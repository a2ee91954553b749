"""Federated training of sub-models of a fully connected network, in float64: slices by numpy, gradients by torch.

Nothing of rayfl computes here but the draws that both sides must share: who takes part, the order of the batches, and
the seeds of drawn units.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import assert_close
from tests.bound_tasks import classification
from tests.methods.reference import DIM, NUM_CLASSES, batches, initial, played, setup_of
from tests.population.statuses import with_status

FIRST, SECOND = 8, 6
"""Units of the two hidden layers."""
RATIOS = (1.0, 0.5, 0.25)
"""Of the clients in turn: 8 and 6, 4 and 3, 2 and 2 units."""
Net = dict[str, Tensor]
Kept = tuple[np.ndarray, np.ndarray]
"""The units of both hidden layers that a client holds."""


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(DIM, FIRST), nn.ReLU()),
        *(nn.Linear(FIRST, SECOND), nn.ReLU(), nn.Linear(SECOND, NUM_CLASSES)),
    )


def setup(method: str, hyper: Mapping[str, Any], ratios: Sequence[float] | None = RATIOS, **options: Any) -> Setup:
    """Five unequal clients, of whom three train in each of four rounds."""
    clients = {"per_round": 3, **({"retention_ratio": ratios} if ratios else {}), **options.pop("clients", {})}
    made = setup_of(method, hyper, build=network, clients=clients, **{"rounds": 4, **options})
    kind = find(Method, method)
    return replace(made, method=kind(classification(network, (DIM,)), kind.Hyper(**hyper)))


def prefix(ratio: float) -> Kept:
    return np.arange(math.ceil(ratio * FIRST)), np.arange(math.ceil(ratio * SECOND))


def cut(net: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    first, second = kept
    return {
        "1.weight": net["1.weight"][first],
        "1.bias": net["1.bias"][first],
        "3.weight": net["3.weight"][second][:, first],
        "3.bias": net["3.bias"][second],
        "5.weight": net["5.weight"][:, second],
        "5.bias": net["5.bias"],
    }


def places(kept: Kept) -> dict[str, Any]:
    """Where the entries of a slice are."""
    first, second = kept
    classes = np.arange(NUM_CLASSES)
    return {
        "1.weight": np.ix_(first, np.arange(DIM)),
        "1.bias": first,
        "3.weight": np.ix_(second, first),
        "3.bias": second,
        "5.weight": np.ix_(classes, second),
        "5.bias": classes,
    }


def logits(net: Net, inputs: Tensor, scale: float = 1.0) -> Tensor:
    """The outputs; hidden layers' products are divided by `scale`."""
    h = torch.relu((inputs @ net["1.weight"].T + net["1.bias"]) / scale)
    h = torch.relu((h @ net["3.weight"].T + net["3.bias"]) / scale)
    return h @ net["5.weight"].T + net["5.bias"]


Values = Mapping[str, np.ndarray]
Loss = Callable[[Net, Tensor, Tensor, int], Tensor]
"""From the slice, inputs, labels and the number of the step to the loss."""


def trained(setup: Setup, round: int, client: int, start: Values, loss: Loss) -> dict[str, np.ndarray]:
    """SGD with momentum and weight decay on the slice."""
    hyper: Any = setup.method.hyper
    net = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    optimizer = torch.optim.SGD(net.values(), lr=hyper.lr, momentum=hyper.momentum, weight_decay=hyper.weight_decay)
    for step, rows in enumerate(batches(setup, round, client)):
        inputs = torch.from_numpy(setup.dataset.train.inputs[rows]).double()
        optimizer.zero_grad()
        loss(net, inputs, torch.from_numpy(setup.dataset.train.labels[rows]), step).backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in net.items()}


def cross_entropy(net: Net, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
    return nn.functional.cross_entropy(logits(net, inputs), labels)


class Server:
    """x <- x - the mean of each entry over those who held it."""

    def step(self, x: dict[str, np.ndarray], mean: Values, held: Values) -> None:
        for name in x:
            x[name] = np.where(held[name], x[name] - mean[name], x[name])


class AdamServer(Server):
    """FedAdam of the entries that were held; what is remembered of the others stays."""

    def __init__(self, lr: float, beta1: float, beta2: float, tau: float) -> None:
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        self.m: dict[str, np.ndarray] = {}
        self.v: dict[str, np.ndarray] = {}

    def step(self, x: dict[str, np.ndarray], mean: Values, held: Values) -> None:
        for name in x:
            m, v = self.m.get(name, np.zeros_like(x[name])), self.v.get(name, np.full_like(x[name], self.tau**2))
            new_m = self.beta1 * m + (1 - self.beta1) * mean[name]
            new_v = self.beta2 * v + (1 - self.beta2) * new_m**2
            moved = x[name] - self.lr * new_m / (np.sqrt(new_v) + self.tau)
            self.m[name], self.v[name] = np.where(held[name], new_m, m), np.where(held[name], new_v, v)
            x[name] = np.where(held[name], moved, x[name])


def reference(
    setup: Setup,
    kept: Callable[[int, int], Kept],
    loss: Callable[[int, int], Loss] = lambda round, client: cross_entropy,
    server: Server | None = None,
    counts: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda client, at: at,
) -> list[dict[str, np.ndarray]]:
    """x after each round. `kept`, `loss`: by round and client. counts: the places that count of those that are held."""
    x = initial(setup)
    server = server or Server()
    models = []
    for round in range(setup.rounds):
        total, weights = ({name: np.zeros_like(value) for name, value in x.items()} for _ in range(2))
        for client in with_status(setup.population.sample_round(round), "delivered"):
            units = kept(round, client)
            start = cut(x, units)
            end = trained(setup, round, client, start, loss(round, client))
            samples = float(setup.partition.train.sizes[client])
            weight = samples if getattr(setup.method.hyper, "weighting", "") == "samples" else 1.0
            of_client = {name: np.zeros_like(value) for name, value in x.items()}
            for name, at in places(units).items():
                of_client[name][at] = start[name] - end[name]
            for name, at in counts(client, places(units)).items():
                total[name][at] += weight * of_client[name][at]
                weights[name][at] += weight
        held = {name: value > 0 for name, value in weights.items()}
        mean = {name: total[name] / np.where(held[name], weights[name], 1.0) for name in x}
        server.step(x, mean, held)
        models.append(dict(x))
    return models


def assert_agrees(setup: Setup, models: Sequence[Values]) -> None:
    """rayfl's models after each round are those of the reference, which moved."""
    start = initial(setup)
    assert max(np.abs(models[-1][name] - start[name]).max() for name in start) > 1e-2
    for (_, run_state), model in zip(played(setup), models, strict=True):
        found = {name: value.numpy() for name, value in run_state.server["params"].items()}
        assert_close(found, {name: value.astype(np.float32) for name, value in model.items()}, tolerance=1e-6)
