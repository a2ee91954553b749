"""Quadratics, with rounds computed by hand: an example is a centre c and a curvature a of 0.5 sum a (x - c)^2."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.data.batches import Batch
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partition import Partition, Shards
from rayfl.methods.base import Method
from rayfl.population.sampling import Clients, Population
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.schedules.base import Schedule
from rayfl.schedules.synchronous import Synchronous
from rayfl.task import BoundTask
from rayfl.topology.graphs import Topology
from rayfl.tree import Tree

SHAPES = {"weight": (2, 4), "bias": (2,)}
DIM = 10
TRAIN = (7, 5, 6, 5)
VALIDATION, HELDOUT, TEST = 2, 4, 2


class Quadratic(BoundTask):
    """Parameters x [10] in two tensors; the loss of an example is 0.5 sum_j a_j (x_j - c_j)^2, its output c o x."""

    def init(self, seed: int) -> Tree:
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal(DIM).astype(np.float32))
        return tree.unvector(x, {name: torch.empty(shape) for name, shape in SHAPES.items()})

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        losses = self._losses(params, batch)
        return losses.mean() if batch.weights is None else (losses * batch.weights).sum() / batch.weights.sum()

    def losses(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        losses = self._losses(params, batch)
        return losses, torch.ones_like(losses)

    def outputs(self, params: Tree, batch: Batch) -> Tensor:
        return batch.inputs[:, 0] * tree.vector(params)

    def _losses(self, params: Tree, batch: Batch) -> Tensor:
        centre, curvature = batch.inputs[:, 0], batch.inputs[:, 1]
        return 0.5 * (curvature * (tree.vector(params) - centre) ** 2).sum(dim=1)


def dataset() -> Dataset:
    """Centres normal, curvatures uniform in [0.5, 1.5]: inputs float32 [n, 2, 10], each client's examples in a row."""
    generator = np.random.default_rng(7)
    count = sum(TRAIN) + len(TRAIN) * (VALIDATION + HELDOUT + TEST)
    owners = np.repeat(np.arange(len(TRAIN)), np.array(TRAIN) + VALIDATION + HELDOUT + TEST)
    # Clients differ: each has a centre of its own around which its examples lie.
    centres = generator.standard_normal((len(TRAIN), DIM))[owners] + 0.3 * generator.standard_normal((count, DIM))
    inputs = np.stack([centres, generator.uniform(0.5, 1.5, (count, DIM))], axis=1).astype(np.float32)
    examples = Examples(inputs, np.zeros(count, np.int64))
    return Dataset("quadratic", train=examples, test=examples, num_classes=1, kind="vector")


def partition() -> Partition:
    """Every client's run of examples cut into train, validation, held-out and test."""
    ends = np.cumsum(np.array(TRAIN) + VALIDATION + HELDOUT + TEST)
    runs = np.split(np.arange(ends[-1]), ends[:-1])
    cuts = [np.split(run, np.cumsum([size, VALIDATION, HELDOUT])) for run, size in zip(runs, TRAIN, strict=True)]
    train, validation, heldout, test = (Shards.of([cut[split] for cut in cuts]) for split in range(4))
    return Partition(train, validation, heldout, test)


def setup(
    method: type[Method] | Method,
    *,
    rounds: int = 4,
    seed: int = 3,
    engine: str = "loop",
    clients: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
    uplink: Compressor | None = None,
    downlink: Compressor | None = None,
    evaluation: Evaluation | None = None,
    stack_width: int = 4,
    hyper: Mapping[str, object] | None = None,
    schedule: Schedule | None = None,
) -> Setup:
    """Four clients on quadratics. `method`: a class, made with `hyper`, or an instance."""
    chosen = method if isinstance(method, Method) else method(Quadratic(), method.Hyper(**(hyper or {})))
    dealt = partition()
    made = Setup(
        seed=seed,
        rounds=rounds,
        method=chosen,
        dataset=dataset(),
        partition=dealt,
        population=Population(Clients(count=len(TRAIN), **(clients or {})), seed, dealt.train.sizes),
        initial_arrays=tree.to_arrays(Quadratic().init(seed)),
        uplink=uplink or Dense(),
        downlink=downlink or Dense(),
        topology=topology,
        schedule=schedule or Synchronous(),
        evaluation=evaluation or Evaluation(own=False, pooled=False),
        engine_name=engine,
        stack_width=stack_width,
    )
    check_setup(made)
    return made
