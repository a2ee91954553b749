"""Recall, precision and F1 of classes or labels, from three counts of each: right, occurring, predicted."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rayfl.metrics.base import Metric, Sums, Targets, Values, are_labels, flat, ratio


class PerClass(Metric):
    """Counts of each class: right (tp), occurring (support), predicted; int64 [classes] each."""

    unit = "%"
    bounds = (0.0, 1.0)
    higher_is_better = True
    judges: ClassVar[tuple[Targets, ...]] = ("classes", "labels")

    def measure(self, outputs: Tensor, targets: Tensor) -> Sums:
        if are_labels(outputs, targets):
            said, true = outputs > 0, targets > 0
            return {"right": (said & true).sum(dim=0), "support": true.sum(dim=0), "predicted": said.sum(dim=0)}
        outputs, targets = flat(outputs, targets)
        said, size = outputs.argmax(dim=-1), outputs.shape[-1]
        found = {"right": targets[said == targets], "support": targets, "predicted": said}
        return {name: torch.bincount(classes, minlength=size) for name, classes in found.items()}

    @abstractmethod
    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        """The value of one class from its counts."""

    def value(self, sums: Sums) -> Values:
        """The mean over classes, and each class as a part."""
        return with_parts(self.name, self.by_class(sums))

    def by_class(self, sums: Sums) -> dict[int, float | None]:
        """The value of each class."""
        counts = (sums[name].tolist() for name in ("right", "support", "predicted"))
        return {place: self.of_class(*counted) for place, counted in enumerate(zip(*counts, strict=True))}


class Recall(PerClass):
    """The share of a class that is recognized, as the mean over the classes that occur (balanced accuracy).

    Parts: the recall of each class, recall/CLASS.
    """

    name = "recall"

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return ratio(right, support)


class Precision(PerClass):
    """The share of right answers among those that say a class, as the mean over the classes that are said.

    Parts: the precision of each class, precision/CLASS.
    """

    name = "precision"

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return ratio(right, predicted)


class F1(PerClass):
    """F1, the harmonic mean of a class's recall and precision, as the mean over the classes that occur (macro). A
    class that occurs and is never said counts 0; one that is only said is left out."""

    name = "f1"
    title = "F1, macro"

    def of_class(self, right: int, support: int, predicted: int) -> float | None:
        return 2 * right / (support + predicted) if support else None

    def value(self, sums: Sums) -> Values:
        return {self.name: mean(self.by_class(sums))}


def mean(values: Mapping[int, float | None]) -> float | None:
    """The mean of the defined values; None if there are none."""
    defined = [value for value in values.values() if value is not None]
    return ratio(sum(defined), len(defined))


def with_parts(name: str, values: Mapping[int, float | None]) -> Values:
    """The mean, and the value of each class as a part."""
    return {name: mean(values), **{f"{name}/{place}": value for place, value in values.items()}}
