"""Regression: numbers to predict."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from rayfl.data.datasets import Dataset
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss
from rayfl.metrics.regression import R2, MeanAbsoluteError
from rayfl.network import Network
from rayfl.settings import unused_with
from rayfl.tasks.base import Task


class Regression(Task):
    """Numbers for each example, by a squared, an absolute or a Huber error.

    Targets and outputs are numbers [batch, outputs]. An example's loss is the mean error of its outputs: (o - t)^2,
    |o - t|, or Huber's, which is (o - t)^2 / 2 up to |o - t| = delta and delta (|o - t| - delta / 2) beyond (Huber,
    Robust Estimation of a Location Parameter, 1964). The score is 1 / (1 + loss).
    """

    name: ClassVar[str] = "regression"
    error: Literal["squared", "absolute", "huber"] = Field(default="squared", description="error of an output")
    delta: float = Field(
        default=1.0,
        gt=0,
        description="distance from which Huber's error grows linearly",
        json_schema_extra=unused_with(error=["squared", "absolute"]),
    )

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        targets = targets.to(outputs.dtype)
        if self.error == "huber":
            errors = functional.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        else:
            errors = (outputs - targets).square() if self.error == "squared" else (outputs - targets).abs()
        losses = errors.flatten(1).mean(dim=1)
        return losses, torch.ones_like(losses)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 1 / (1 + self.loss(outputs, targets)[0])

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), MeanAbsoluteError(), R2())

    def num_outputs(self, dataset: Dataset) -> int:
        return dataset.train.labels.shape[-1]

    def check(self, dataset: Dataset, network: Network) -> None:
        if dataset.train.labels.ndim != 2:
            raise self.misfit("numbers [n, outputs], also for one output", dataset)
