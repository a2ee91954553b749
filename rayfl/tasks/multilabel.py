"""Multilabel: several yes-or-no labels for each example."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayfl.data.check import first_row
from rayfl.data.datasets import Dataset
from rayfl.metrics.accuracy import Accuracy
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss
from rayfl.network import Network
from rayfl.tasks.base import Task


class Multilabel(Task):
    """Several yes-or-no labels for each example, by the binary cross-entropy of each.

    Targets are 0 or 1 [batch, labels], outputs are logits of the same shape: above 0 means yes. An example's loss is
    the mean over its labels, its score the share of them that is right.
    """

    name: ClassVar[str] = "multilabel"

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        targets = targets.to(outputs.dtype)
        losses = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)
        return losses, torch.ones_like(losses)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0)).float().mean(dim=1)

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy())

    def num_outputs(self, dataset: Dataset) -> int:
        return dataset.train.labels.shape[-1]

    def check(self, dataset: Dataset, network: Network) -> None:
        splits = (dataset.train.labels, dataset.test.labels)
        if not all(labels.ndim == 2 and are_yes_or_no(labels) for labels in splits):
            raise self.misfit("0 or 1 for each label, [n, labels]", dataset)


def are_yes_or_no(labels: np.ndarray) -> bool:
    """Whether all labels are 0 or 1."""
    return first_row(labels, lambda part: (part != 0) & (part != 1)) is None
