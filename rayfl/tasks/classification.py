"""Classification: one class of several for each example."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayfl.data.datasets import Dataset
from rayfl.metrics.accuracy import Accuracy
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss
from rayfl.network import Network
from rayfl.tasks.base import Task


class Classification(Task):
    """One class of several for each example, by cross-entropy.

    Targets are integers [batch], outputs are logits [batch, num_classes]. The score is 1 if the largest logit is that
    of the class, otherwise 0.
    """

    name: ClassVar[str] = "classification"

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        return losses, torch.ones_like(losses)

    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        # One operation for five, with the same gradient bits; a subclass may have a loss of its own.
        if weights is None and type(self).loss is Classification.loss:
            return functional.cross_entropy(outputs, targets)
        return super().mean_loss(outputs, targets, weights)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=1) == targets).float()

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy())

    def check(self, dataset: Dataset, network: Network) -> None:
        labels = dataset.train.labels
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            cure = "; these look one-hot: give labels.argmax(1), or task='multilabel'" if look_one_hot(labels) else ""
            raise self.misfit(f"one class number for each input, [n]{cure}", dataset)


def look_one_hot(labels: np.ndarray) -> bool:
    """Whether each of the first rows has one 1 and otherwise zeros."""
    labels = labels[:1000]
    return labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())
