"""Small experiments, and the same local training in float64 numpy: softmax regression with its gradient in closed form.

Nothing of rayfl computes here but the draws that both sides must share: who takes part, and the order of the batches.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.data.batches import schedule
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partition import Partition, Shards
from rayfl.determinism import seeding
from rayfl.methods.base import Method
from rayfl.methods.compressed.fedpse import FedPSEHyper
from rayfl.methods.shared.local_training import LocalTraining, LocalWork
from rayfl.models.dense import Logistic
from rayfl.population.sampling import Clients, Population
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup
from tests.bound_tasks import classification

Vectors = dict[str, np.ndarray]
"""Parameters by name, float64."""

DIM, NUM_CLASSES = 6, 3
SIZES = (9, 4, 14, 6, 11)
"""Train examples of the clients; unequal, so that weights by examples and uniform ones differ."""


def vectors(sizes: Sequence[int] = SIZES, seed: int = 0, dead: Mapping[int, Sequence[int]] | None = None) -> Dataset:
    """Gaussian inputs [n, DIM] with random labels. `dead`: features that are 0 in all examples of a client."""
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((sum(sizes), DIM)).astype(np.float32)
    starts = np.cumsum([0, *sizes])
    for client, features in (dead or {}).items():
        inputs[starts[client] : starts[client + 1], list(features)] = 0
    train = Examples(inputs, draw.integers(0, NUM_CLASSES, sum(sizes)))
    test = Examples(draw.standard_normal((8, DIM)).astype(np.float32), draw.integers(0, NUM_CLASSES, 8))
    return Dataset(name="vectors", train=train, test=test, num_classes=NUM_CLASSES, kind="vector")


def setup_of(
    method: str | type[Method],
    hyper: Mapping[str, Any],
    *,
    sizes: Sequence[int] = SIZES,
    dataset: Dataset | None = None,
    build: Callable[[], nn.Module] | None = None,
    clients: Mapping[str, Any] | None = None,
    rounds: int = 3,
    uplink: Compressor | None = None,
    seed: int = 1,
) -> Setup:
    """A method on `sizes[i]` consecutive examples for client i; by default logistic regression on `vectors`."""
    dataset = dataset or vectors(sizes)
    task = classification(build or Logistic().builder(dataset.input_shape, dataset.num_classes))
    kind = find(Method, method)
    cuts = np.cumsum(sizes)[:-1]
    empty = Shards.empty(len(sizes))
    train = Shards.of(np.split(np.arange(sum(sizes)), cuts))
    test = Shards.of(np.array_split(np.arange(len(dataset.test)), len(sizes)))
    return Setup(
        seed=seed,
        rounds=rounds,
        method=kind(task, kind.Hyper(**hyper)),
        dataset=dataset,
        partition=Partition(train=train, validation=empty, heldout=empty, test=test),
        population=Population(Clients(**{"count": len(sizes), **(clients or {})}), seed, train.sizes),
        initial_arrays=tree.to_arrays(task.init(seed)),
        uplink=uplink or Dense(),
        downlink=Dense(),
        evaluation=Evaluation(every=0),
    )


def played(setup: Setup) -> list[tuple[RoundRecord, RunState]]:
    """All rounds, with the world after each."""
    seen: list[tuple[RoundRecord, RunState]] = []
    simulate(setup, InlineExecutor(setup), lambda record, run_state: seen.append((record, run_state)))
    return seen


def initial(setup: Setup) -> Vectors:
    """The parameters of round 0."""
    return doubles(setup.initial)


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """float32 numbers and those of a reference in float64: `tolerance` times the largest one apart at most."""
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def doubles(params: Mapping[str, Any]) -> Vectors:
    """Tensors or float32 arrays as float64."""
    return {name: np.asarray(value, np.float64) for name, value in params.items()}


def batches(setup: Setup, round: int, client: int) -> list[np.ndarray]:
    """Rows of the dataset, a batch a step, in the order that (seed, round, client) gives."""
    hyper = setup.method.hyper
    assert isinstance(hyper, LocalWork)
    rows = setup.partition.train[client]
    plan = schedule(
        len(rows),
        epochs=hyper.epochs or (None if hyper.steps else 1),
        steps=hyper.steps,
        batch_size=hyper.batch_size or None,
        generator=seeding.generator(setup.seed, round, client, "train/train/batches"),
    )
    return [rows[chosen] for chosen in plan]


def softmax_gradient(params: Vectors, inputs: np.ndarray, labels: np.ndarray) -> Vectors:
    """Gradient of the mean cross-entropy of softmax(W x + b): (p - onehot) x^T and p - onehot, averaged."""
    logits = inputs @ params["1.weight"].T + params["1.bias"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    p /= len(labels)
    return {"1.weight": p.T @ inputs, "1.bias": p.sum(axis=0)}


def trained(setup: Setup, round: int, client: int, start: Vectors) -> tuple[Vectors, int]:
    """Local training by the equations, in float64: the trained parameters, and the examples that were processed."""
    hyper, examples = setup.method.hyper, setup.dataset.train
    assert isinstance(hyper, LocalWork)
    params, lr = dict(start), hyper.lr * hyper.lr_decay**round
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    num_samples = 0
    for step, rows in enumerate(batches(setup, round, client), start=1):
        gradient = softmax_gradient(params, examples.inputs[rows].astype(np.float64), examples.labels[rows])
        norm = np.sqrt(sum((part**2).sum() for part in gradient.values()))
        factor = 1.0 if hyper.clip_norm is None else min(1.0, hyper.clip_norm / norm)
        for name, part in gradient.items():
            g = factor * part + hyper.weight_decay * params[name]
            if hyper.optimizer == "adam":
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                corrected = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
                params[name] = params[name] - lr * first[name] / (1 - 0.9**step) / corrected
            else:
                first[name] = hyper.momentum * first[name] + g
                params[name] = params[name] - lr * first[name]
        num_samples += len(rows)
    return params, num_samples


def weight(setup: Setup, client: int, num_seen: int) -> float:
    """A client's weight in an average."""
    hyper, held = setup.method.hyper, len(setup.partition.train[client])
    assert isinstance(hyper, LocalTraining | FedPSEHyper)
    return {"seen": float(num_seen), "samples": float(held), "uniform": 1.0}[hyper.weighting]


class TinyCNN(nn.Module):
    """Convolution, GroupNorm, pooling, one linear layer, for images [1, 8, 8] in 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        # Without bias: GroupNorm takes the mean of two channels off, so two biases would move alike, a tie in top k.
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 3 * 3, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(images))), 2)
        return self.head(features.flatten(1))


def images(sizes: Sequence[int] = SIZES, seed: int = 0) -> Dataset:
    """Random grey images [1, 8, 8] with random labels."""
    draw = np.random.default_rng(seed)

    def examples(count: int) -> Examples:
        return Examples(draw.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8), draw.integers(0, NUM_CLASSES, count))

    return Dataset(
        name="images", train=examples(sum(sizes)), test=examples(8), num_classes=NUM_CLASSES, kind="image",
        mean=(0.4,), std=(0.3,),
    )  # fmt: skip


def trained_by_torch(setup: Setup, round: int, client: int, start: Vectors) -> tuple[Vectors, int]:
    """The same training by an ordinary module and torch.optim, in float64."""
    hyper, examples = setup.method.hyper, setup.dataset.train
    assert isinstance(hyper, LocalWork)
    net = TinyCNN().double()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
    make = torch.optim.Adam if hyper.optimizer == "adam" else partial(torch.optim.SGD, momentum=hyper.momentum)
    optimizer = make(net.parameters(), lr=hyper.lr * hyper.lr_decay**round, weight_decay=hyper.weight_decay)
    num_samples = 0
    for rows in batches(setup, round, client):
        pixels = (torch.from_numpy(examples.inputs[rows]).double() / 255 - 0.4) / 0.3
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(pixels), torch.from_numpy(examples.labels[rows])).backward()
        if hyper.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), hyper.clip_norm)
        optimizer.step()
        num_samples += len(rows)
    return doubles(net.state_dict()), num_samples
