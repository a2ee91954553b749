"""Your own task: a loss that rayfl does not have, and data for it."""

import numpy as np
import torch
from torch import Tensor

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.network import Network
from rayfl.tasks.base import Task


class Quantile(Task):
    """The quantile of a number, by the pinball loss: q (t - o) where the target t is above the output o, else
    (1 - q) (o - t).

    Koenker, Bassett: Regression Quantiles, Econometrica 1978.
    """

    q: float = Field(default=0.9, gt=0, lt=1, description="the share of targets that should lie below the output")

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss over an example's numbers [batch], and a count of 1 for each example [batch]."""
        above = targets - outputs
        losses = torch.maximum(self.q * above, (self.q - 1) * above).mean(dim=1)
        return losses, torch.ones_like(losses)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scores [batch] for methods that compare one with a threshold: 1 without an error, less with a larger one."""
        return 1 / (1 + self.loss(outputs, targets)[0])

    def check(self, dataset: Dataset, network: Network) -> None:
        """Refuse classes."""
        if dataset.has_classes:
            raise self.misfit("numbers [n, outputs]", dataset)


class Tides(Source):
    """The sea level in harbours, each an owner: a sine of the hour, the harbour's own offset, and noise up to 1."""

    samples: int = Field(default=200, ge=10, description="samples of each harbour")
    harbours: int = Field(default=8, ge=1, description="owners")

    def load(self) -> Dataset:
        """Draw the samples: the input is the hour as a point on a circle [n, 2], the target the level [n, 1]."""
        generator = np.random.default_rng(0)
        owners = np.repeat(np.arange(self.harbours), self.samples)
        angle = generator.uniform(0, 2 * np.pi, len(owners))
        inputs = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        levels = np.sin(angle) + 0.1 * owners / self.harbours + generator.uniform(0, 1, len(owners))
        is_test = generator.random(len(owners)) < 0.2
        train, test = (
            Examples(inputs[rows], levels[rows, None].astype(np.float32), owners[rows]) for rows in (~is_test, is_test)
        )
        return Dataset("tides", train, test, num_classes=1, kind="vector")
