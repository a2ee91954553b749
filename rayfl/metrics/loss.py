"""The task's loss, the negative log-likelihood, and the perplexity."""

import math
from typing import Self

from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import functional

from rayfl.metrics.accuracy import over_example
from rayfl.metrics.base import LossOf, PerExample
from rayfl.metrics.facts import LOSS, Facts
from rayfl.metrics.targets import are_labels


class Loss(PerExample):
    """The mean of the task's loss, over examples or over the units that the task counts (tokens)."""

    name = "loss"
    higher_is_better = False
    ranks = False
    _task: LossOf | None = PrivateAttr(default=None)

    def for_data(self, task: LossOf, targets: Tensor) -> Self:
        bound = self.model_copy()
        bound._task = task
        return bound

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert self._task is not None, "for_data gives the task"
        return self._task.loss(outputs, targets)

    def facts(self, name: str) -> Facts:
        return LOSS


class NegativeLogLikelihood(PerExample):
    """The mean negative log-likelihood of the true labels (cross-entropy), over classes, tokens or labels."""

    name = "nll"
    title = "Negative log-likelihood"
    unit = "nats"
    bounds = (0.0, math.inf)
    higher_is_better = False
    takes_targets = ("classes", "labels")

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if are_labels(outputs, targets):
            numbers = targets.to(outputs.dtype)
            return over_example(functional.binary_cross_entropy_with_logits(outputs, numbers, reduction="none"))
        losses = functional.cross_entropy(outputs.movedim(-1, 1), targets.clamp(min=0), reduction="none")
        return over_example(losses, targets >= 0)


class Perplexity(NegativeLogLikelihood):
    """The exponential of the mean negative log-likelihood: 1 for a model that is certain and right."""

    name = "perplexity"
    title = ""
    unit = ""
    bounds = (1.0, math.inf)
    takes_targets = ("classes",)

    def of_mean(self, mean: float) -> float:
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf
