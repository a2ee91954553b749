"""The confusion matrix."""

import torch

from rayfl.metrics.base import Metric, Sums, Values, flat


class Confusion(Metric):
    """The number of test examples by their class and by the predicted class, as confusion/CLASS/PREDICTED. The report
    draws it as a matrix."""

    name = "confusion"
    title = "Confusion matrix"
    unit = "examples"
    bounds = (0.0, float("inf"))
    drawn = "matrix"
    judges = ("classes",)
    # Each number of the matrix is a row of the records at each evaluation.
    most_classes = 50

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Sums:
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
