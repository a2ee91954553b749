"""The confusion matrix."""

from typing import ClassVar

import torch
from torch import Tensor

from rayfl.errors import RayflError
from rayfl.metrics.base import Metric, Sums, Targets, Values, flat, sizes

MOST_CLASSES = 50
"""A matrix of more classes is refused: each of its numbers is a row of the records at each evaluation."""


class Confusion(Metric):
    """The number of test examples by their class and by the class that is said, as confusion/CLASS/SAID. The page draws
    it as a matrix."""

    name = "confusion"
    title = "Confusion matrix"
    unit = "examples"
    bounds = (0.0, float("inf"))
    drawn = "matrix"
    judges: ClassVar[tuple[Targets, ...]] = ("classes",)

    def check(self, targets: Targets, outputs: Tensor) -> None:
        super().check(targets, outputs)
        if sizes(outputs) > MOST_CLASSES:
            raise RayflError(
                f"metric {self.name!r} draws at most {MOST_CLASSES} classes, and there are {sizes(outputs)}; use "
                "recall or f1"
            )

    def measure(self, outputs: Tensor, targets: Tensor) -> Sums:
        outputs, targets = flat(outputs, targets)
        size = outputs.shape[-1]
        cells = torch.bincount(targets * size + outputs.argmax(dim=-1), minlength=size * size)
        return {"cells": cells.reshape(size, size)}

    def value(self, sums: Sums) -> Values:
        return {
            f"{self.name}/{true}/{said}": float(cell)
            for true, row in enumerate(sums["cells"].tolist())
            for said, cell in enumerate(row)
        }
