"""Your own metric: Brier's score (Verification of Forecasts Expressed in Terms of Probability, 1950)."""

import torch
from pydantic import Field
from torch import Tensor

from rayfl.metrics.base import PerExample


class Brier(PerExample):
    """The squared distance between the predicted probabilities and the one-hot label, from 0 to 2."""

    title = "Brier score"
    bounds = (0.0, 2.0)
    higher_is_better = False
    takes_targets = ("classes",)

    temperature: float = Field(default=1.0, gt=0, description="divides the logits")

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum and the count of each example, [batch] each."""
        probabilities = (outputs.double() / self.temperature).softmax(dim=1)
        answers = torch.nn.functional.one_hot(targets, outputs.shape[1])
        return (probabilities - answers).square().sum(dim=1), torch.ones(len(outputs))
