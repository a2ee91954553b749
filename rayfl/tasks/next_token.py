"""Next token: after each token of a sequence, the one that follows."""

from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional

from rayfl.data.check import first_row
from rayfl.data.datasets import Dataset
from rayfl.metrics.accuracy import Accuracy
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss, Perplexity
from rayfl.network import Network
from rayfl.tasks.base import Task


class NextToken(Task):
    """The token that follows each token of a sequence, by cross-entropy.

    Targets are tokens [batch, length], negative where nothing is to be predicted; outputs are logits
    [batch, length, tokens]. An example's loss is the sum over its targets, and its count is their number, so a mean is
    one over tokens. The score is the share of tokens whose largest logit is right.
    """

    name: ClassVar[str] = "next-token"

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counted = (targets >= 0).to(outputs.dtype)
        wanted = targets.clamp(min=0).flatten(0, 1)
        losses = functional.cross_entropy(outputs.flatten(0, 1), wanted, reduction="none").view_as(counted)
        return (losses * counted).sum(dim=1), counted.sum(dim=1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        right = (outputs.argmax(dim=-1) == targets).float().sum(dim=1)
        return right / (targets >= 0).sum(dim=1).clamp(min=1)

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy(), Perplexity())

    def output_shape(self, dataset: Dataset) -> tuple[int, ...]:
        return (*dataset.input_shape, self.num_outputs(dataset))

    def check(self, dataset: Dataset, network: Network) -> None:
        for samples in (dataset.train, dataset.test):
            labels = samples.labels
            if labels.shape != samples.inputs.shape or not np.issubdtype(labels.dtype, np.integer):
                raise self.misfit(f"tokens of the shape of the inputs, {['n', *dataset.input_shape]}", dataset)
            row = first_row(labels, lambda part: part >= dataset.num_classes)
            if row is not None:
                raise self.misfit(f"tokens below {dataset.num_classes} (row {row} has a larger one)", dataset)
