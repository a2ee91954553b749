"""Learning rates by round: constant, exponential, or half a cosine over all rounds."""

import math
from typing import Literal, Self

from pydantic import Field

from rayfl.methods.base import HyperParameters, RayflError, unused_with

LrSchedule = Literal["constant", "exponential", "cosine", "cosine-literal"]
NOT_EXPONENTIAL = unused_with(lr_schedule=["constant", "cosine", "cosine-literal"])


class LearningRate(HyperParameters):
    """A learning rate and how it changes from round to round, r = 0, 1, ...

    constant: lr; exponential: lr lr_decay^r, with lr_decay = 1 by default; cosine: lr (1 + cos(pi r / R)) / 2, from lr
    to almost 0; cosine-literal: twice that, from 2 lr, as Elastic Aggregation (Chen et al., CVPR 2023, section 4)
    prints it. R is `lr_rounds`, by default the experiment's rounds.
    """

    lr: float = Field(default=0.05, gt=0, description="learning rate, eta")
    lr_schedule: LrSchedule = Field(
        default="exponential",
        description="learning rate by round: constant, exponential, cosine (to 0), cosine-literal (from 2 lr to 0)",
    )
    lr_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor of exponential: the rate of round r is lr * lr_decay ** r",
        json_schema_extra=NOT_EXPONENTIAL,
    )
    lr_rounds: int | None = Field(
        default=None,
        ge=1,
        description="rounds that the cosine takes, R; by default all of the experiment",
        json_schema_extra=unused_with(lr_schedule=["constant", "exponential"]),
    )

    def rate(self, round: int) -> float:
        """The learning rate of round `round`, from 0; `for_num_rounds` must have given a cosine its length."""
        if self.lr_schedule == "constant":
            return self.lr
        if self.lr_schedule == "exponential":
            return self.lr * self.lr_decay**round
        assert self.lr_rounds is not None and round < self.lr_rounds, "see for_num_rounds"
        wave = 1 + math.cos(math.pi * round / self.lr_rounds)
        return self.lr * (0.5 * wave if self.lr_schedule == "cosine" else wave)

    def for_num_rounds(self, rounds: int) -> Self:
        if self.lr_schedule not in ("cosine", "cosine-literal"):
            return self
        if self.lr_rounds is None:
            return self.model_copy(update={"lr_rounds": rounds})
        if self.lr_rounds < rounds:
            raise RayflError(
                f"lr_rounds={self.lr_rounds} is below the {rounds} rounds of training, and the cosine would end before "
                "they do; leave lr_rounds out"
            )
        return self
