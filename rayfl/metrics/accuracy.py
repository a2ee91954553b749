"""Shares of correct predictions."""

import torch

from rayfl.metrics.base import Field, PerExample, RayflError, Targets, sizes
from rayfl.metrics.targets import are_labels


class Accuracy(PerExample):
    """The share of correct predictions. Of classes the one with the largest logit is predicted; of yes-or-no labels a
    logit above 0 means yes."""

    name = "accuracy"
    unit = "%"
    bounds = (0.0, 1.0)
    higher_is_better = True
    takes_targets = ("classes", "labels")

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if are_labels(outputs, targets):
            return over_example((outputs > 0) == (targets > 0))
        return over_example(outputs.argmax(dim=-1) == targets, targets >= 0)


class TopKAccuracy(Accuracy):
    """The share of answers that are among the `k` largest logits. Of equal logits the first class counts as larger."""

    name = "top-k"
    takes_targets = ("classes",)

    k: int = Field(default=5, ge=1, description="number of guesses")

    @property
    def value_name(self) -> str:
        return f"top_{self.k}"

    def check(self, targets: Targets, outputs: torch.Tensor) -> None:
        super().check(targets, outputs)
        if self.k >= sizes(outputs):
            raise RayflError(f"={self.k} guesses of {sizes(outputs)} classes are always right; give fewer", ("k",))

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        right = targets.clamp(min=0).unsqueeze(-1)
        logit = outputs.gather(-1, right)
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        before = (outputs > logit) | ((outputs == logit) & (classes < right))
        return over_example(before.sum(dim=-1) < self.k, targets >= 0)


def over_example(values: torch.Tensor, counted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and the count [batch] of values [batch, ...], of those that are `counted` (all if None)."""
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    return in_rows(values.double() * counted).sum(dim=1), in_rows(counted.double()).sum(dim=1)


def in_rows(values: torch.Tensor) -> torch.Tensor:
    """[batch, ...] as [batch, m], also if the batch is empty."""
    return values.unsqueeze(1).flatten(1)
