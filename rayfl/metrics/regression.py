"""Errors of predicted numbers."""

import math
from typing import Self

import torch
from pydantic import PrivateAttr

from rayfl.metrics.accuracy import in_rows, over_example
from rayfl.metrics.base import Metric, MetricSums, MetricValues, PerExample


class MeanAbsoluteError(PerExample):
    """The mean distance between prediction and target, over all outputs."""

    name = "mae"
    title = "Mean absolute error"
    bounds = (0.0, math.inf)
    higher_is_better = False
    takes_targets = ("numbers", "labels")

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return over_example(differences(outputs, targets).abs())


class RootMeanSquaredError(MeanAbsoluteError):
    """The root of the mean squared distance between prediction and target, over all outputs."""

    name = "rmse"
    title = "Root mean squared error"

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return over_example(differences(outputs, targets).square())

    def of_mean(self, mean: float) -> float:
        return math.sqrt(mean)


class R2(Metric):
    """The share of the targets' variance that predictions explain: 1 - squared error / variance.

    It is the mean over the outputs whose targets vary, and undefined if none do. Below 0 the mean of the targets would
    be the better prediction. Sums are taken around the mean of the training targets, so that little precision is lost.
    """

    name = "r2"
    title = "R2"
    bounds = (-math.inf, 1.0)
    higher_is_better = True
    takes_targets = ("numbers", "labels")
    _centre: torch.Tensor = PrivateAttr(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def for_data(self, task: object, targets: torch.Tensor) -> Self:
        bound = self.model_copy()
        bound._centre = targets.double().mean(dim=0)
        return bound

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        around = in_rows(targets.double() - self._centre.to(targets.device))
        return {
            "count": torch.tensor(len(targets)),
            "errors": in_rows(differences(outputs, targets).square()).sum(dim=0),
            "around": around.sum(dim=0),
            "squares": around.square().sum(dim=0),
        }

    def value(self, sums: MetricSums) -> MetricValues:
        spread = sums["squares"] - sums["around"].square() / max(float(sums["count"]), 1.0)
        # As the centre is not the mean, the variance of equal targets may be a rounding error instead of 0.
        defined = spread > 1e-12 * sums["squares"]
        shares = 1 - sums["errors"][defined] / spread[defined]
        return {self.name: float(shares.mean()) if len(shares) else None}


def differences(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Predictions minus targets, float64; outputs [batch, 1] are taken as [batch] if the targets are [batch]."""
    return outputs.double().reshape(targets.shape) - targets.double()
