"""What the simulations in numpy share: x as one float64 vector, a client's examples, gradients in closed form.

Only the data and the order of the batches are taken from rayfl: which examples a batch holds is no method's business.
"""

from dataclasses import dataclass

import numpy as np

from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.rounds.setup import Setup
from rayfl.tree import Tree

WEIGHT = slice(0, 8)
BIAS = slice(8, 10)
TENSORS = (WEIGHT, BIAS)


def flat(x: Tree) -> np.ndarray:
    """All entries in order, float64 [10]."""
    return np.concatenate([tensor.numpy().reshape(-1) for tensor in x.values()]).astype(np.float64)


@dataclass(frozen=True)
class Points:
    """Examples: centres c and curvatures a, float64 [n, 10]."""

    c: np.ndarray
    a: np.ndarray

    def __len__(self) -> int:
        return len(self.c)

    def __getitem__(self, rows: np.ndarray) -> "Points":
        return Points(self.c[rows], self.a[rows])

    def loss(self, x: np.ndarray) -> float:
        """mean_n 0.5 sum_j a_nj (x_j - c_nj)^2."""
        return float((0.5 * self.a * (x - self.c) ** 2).sum(axis=1).mean())

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """mean_n a_n (x - c_n)."""
        return (self.a * (x - self.c)).mean(axis=0)

    def hessian(self) -> np.ndarray:
        """The diagonal mean_n a_n."""
        return self.a.mean(axis=0)


def points(setup: Setup, client: int, split: str = "train") -> Points:
    """A client's examples in `split`."""
    examples = setup.dataset.train.inputs[setup.partition.split(split)[client]].astype(np.float64)
    return Points(examples[:, 0], examples[:, 1])


def batches(
    setup: Setup,
    round: int,
    client: int,
    stage: str = "train",
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int,
) -> list[Points]:
    """The batches of train examples that the client sees in a stage of a round."""
    mine = points(setup, client)
    generator = seeding.generator(setup.seed, round, client, f"train/{stage}/batches")
    rows = schedule(len(mine), epochs=epochs, steps=steps, batch_size=batch_size, generator=generator)
    return [mine[batch] for batch in rows]


def start(setup: Setup) -> np.ndarray:
    """The parameters of round 0."""
    return flat(setup.initial)
