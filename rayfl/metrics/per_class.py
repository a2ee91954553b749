"""Recall, precision and F1 of classes or labels, from three counts per class: right, occurring, predicted; and the
confusion matrix of classes."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import PrivateAttr

from rayfl.metrics.base import Metric, MetricSums, MetricValues, ratio
from rayfl.metrics.targets import are_labels, flat


class ByName(Metric):
    """Base of metrics whose parts are named after classes: by their names in the data, or by their numbers."""

    _classes: Sequence[str] = PrivateAttr(default=())

    def with_names(self, classes: Sequence[str]) -> Self:
        if not classes:
            return self
        bound = self.model_copy()
        # A slash separates the parts of a value's name.
        bound._classes = [name.replace("/", "%2F") for name in classes]
        return bound

    def names(self, count: int) -> Sequence[str]:
        """The names of `count` classes."""
        return self._classes if len(self._classes) == count else [*map(str, range(count))]


class PerClass(ByName):
    """Counts of each class: right (tp), occurring (support), predicted; int64 [classes] each."""

    unit = "%"
    bounds = (0.0, 1.0)
    higher_is_better = True
    has_parts: ClassVar[bool] = True
    """Whether the value of each class is recorded too."""
    takes_targets = ("classes", "labels")

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        if are_labels(outputs, targets):
            said, true = outputs > 0, targets > 0
            return {"right": (said & true).sum(dim=0), "support": true.sum(dim=0), "predicted": said.sum(dim=0)}
        outputs, targets = flat(outputs, targets)
        said = outputs.argmax(dim=-1)
        size = outputs.shape[-1]
        counted = {"right": targets[said == targets], "support": targets, "predicted": said}
        return {name: torch.bincount(classes, minlength=size) for name, classes in counted.items()}

    @abstractmethod
    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        """The value of one class from its counts."""

    def value(self, sums: MetricSums) -> MetricValues:
        """The mean over the classes for which it is defined, and each class as a part."""
        counts = (sums[name].tolist() for name in ("right", "support", "predicted"))
        values = [self.of_class(*counted) for counted in zip(*counts, strict=True)]
        defined = [value for value in values if value is not None]
        parts = {f"{self.name}/{name}": value for name, value in zip(self.names(len(values)), values, strict=True)}
        return {self.name: ratio(sum(defined), len(defined)), **(parts if self.has_parts else {})}


class Recall(PerClass):
    """The share of a class that is recognized, as the mean over the classes that occur (balanced accuracy).

    Parts: the recall of each class, recall/CLASS.
    """

    name = "recall"

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return ratio(right, support)


class Precision(PerClass):
    """The share of a class's predictions that are correct, as the mean over the classes that are predicted.

    Parts: the precision of each class, precision/CLASS.
    """

    name = "precision"

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return ratio(right, predicted)


class F1(PerClass):
    """F1, the harmonic mean of a class's recall and precision, as the mean over the classes that occur (macro). A
    class that occurs and is never predicted counts 0; one that is only predicted is left out."""

    name = "f1"
    title = "F1, macro"
    has_parts = False

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return 2 * right / (support + predicted) if support else None


class Confusion(ByName):
    """The number of test examples by their class and by the predicted class, as confusion/CLASS/PREDICTED. The report
    draws it as a matrix."""

    name = "confusion"
    title = "Confusion matrix"
    unit = "examples"
    bounds = (0.0, float("inf"))
    drawn = "matrix"
    takes_targets = ("classes",)
    # Each number of the matrix is a row of the records at each evaluation.
    most_classes = 50

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        outputs, targets = flat(outputs, targets)
        size = outputs.shape[-1]
        cells = torch.bincount(targets * size + outputs.argmax(dim=-1), minlength=size * size)
        return {"cells": cells.reshape(size, size)}

    def value(self, sums: MetricSums) -> MetricValues:
        cells = sums["cells"].tolist()
        names = self.names(len(cells))
        return {
            f"{self.name}/{true}/{said}": float(cell)
            for true, row in zip(names, cells, strict=True)
            for said, cell in zip(names, row, strict=True)
        }
