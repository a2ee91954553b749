"""Metric: sums over examples, and the values computed from them; `[evaluation] metrics` chooses them."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
from pydantic import Field
from torch import Tensor

from rayfl.choices.kinds import Choice
from rayfl.errors import RayflError
from rayfl.metrics.facts import Facts, FigureKind

Targets = Literal["classes", "labels", "numbers"]
"""The kind of targets. classes: integers, one for each row of logits, where negative ones are left out (padding);
labels: 0 or 1 for each output (multi-label); numbers: one for each output (regression)."""
MetricSums = Mapping[str, Tensor]
"""Sums of fixed shapes by name, int64 or float64."""
MetricValues = Mapping[str, float | None]
"""Values by name; None where the value is undefined (0 divided by 0)."""


class LossOf(Protocol):
    """A task, as far as metrics need it."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example as a sum, and its count (see `Task.loss`), [batch] each."""


class Metric(Choice, ABC):
    """Sums over examples, and values computed from them. Its settings are its fields.

    `value` names the recorded values: "accuracy" becomes `pooled/accuracy`, `own/accuracy`, ... A name with a slash
    ("recall/3") is a part of the metric, which gets no column in reports. Class attributes describe all values; `facts`
    can describe single ones.
    """

    label = "metric"
    package = "rayfl.metrics"
    title: ClassVar[str] = ""
    """Its title in reports; by default its name."""
    unit: ClassVar[str] = ""
    """The unit of the values. "%": they are shares of 1, and are shown in percent."""
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """The smallest and the largest value."""
    higher_is_better: ClassVar[bool | None] = None
    """Whether larger values are better; None: neither direction is."""
    ranks: ClassVar[bool] = True
    """Whether reports compare runs by it. It needs `higher_is_better`."""
    drawn: ClassVar[FigureKind] = ""
    """The figure that the report draws of its parts. They are recorded for all clients together and not for each."""
    renamed = {"judges": "takes_targets"}
    # Declared, as older pydantic would else refuse it in words of its own.
    judges: ClassVar[tuple[Targets, ...]]
    takes_targets: ClassVar[tuple[Targets, ...]] = ("classes", "labels", "numbers")
    """The kinds of targets that it accepts."""
    most_classes: ClassVar[float] = math.inf
    """More classes or labels are refused."""

    @abstractmethod
    def measure(self, outputs: Tensor, targets: Tensor) -> MetricSums:
        """The sums of a batch, int64 or float64, on any device, of shapes that do not depend on the batch's size.

        outputs: the network's, float32 [batch, ...]; targets: [batch, ...]. Batches of a client are added up, then
        clients in their order.
        """

    @abstractmethod
    def value(self, sums: MetricSums) -> MetricValues:
        """The values of sums, by names that are always the same; None for one that is undefined.

        NaN for the first examples, or for none, is refused before a run. Later NaN is recorded as None; of sums that
        are NaN or infinite, because the model has diverged, it stays NaN. Infinity is a value.
        """

    def for_data(self, task: LossOf, targets: Tensor) -> Self:
        """The metric for an experiment: its task and its training targets [n, ...]. The same by default."""
        return self

    def with_names(self, classes: Sequence[str]) -> Self:
        """The metric for data whose classes or labels have names, () if they have none. The same by default."""
        return self

    @property
    def value_name(self) -> str:
        """The name of its value, if it has one."""
        return self.name.replace("-", "_")

    def facts(self, name: str) -> Facts:
        """The facts of the value called `name`."""
        metric, _, part = name.partition("/")
        low, high = (bound if math.isfinite(bound) else None for bound in self.bounds)
        title = self.title or metric.replace("_", " ").capitalize()
        what = " ".join((type(self).__doc__ or "").replace("`", "").split())
        return Facts(
            title=f"{title}: {part.replace('/', ', ')}" if part else title,
            # The first sentence.
            meaning=re.split(r"\.\s", what)[0].rstrip("."),
            unit=self.unit,
            low=low,
            high=high,
            higher_is_better=self.higher_is_better,
            ranks=self.ranks and not part and self.higher_is_better is not None,
            drawn=self.drawn if part else "",
        )

    def check(self, targets: Targets, outputs: Tensor) -> None:
        """Raise RayflError if the metric cannot evaluate an experiment's targets, or outputs like these [2, ...]."""
        if targets not in self.takes_targets:
            raise RayflError(
                f"metric {self.name!r} is for {' or '.join(map(_WORDS.__getitem__, self.takes_targets))}, and this "
                f"experiment has {_WORDS[targets]}; remove it from evaluation.metrics",
            )
        if sizes(outputs) > self.most_classes:
            raise RayflError(
                f"metric {self.name!r} takes at most {self.most_classes} classes, and there are {sizes(outputs)}; use "
                "recall or f1"
            )


_WORDS: Mapping[Targets, str] = {
    "classes": "a class for each example",
    "labels": "several yes-or-no labels for each example",
    "numbers": "numbers to be predicted",
}


class PerExample(Metric):
    """A metric that is a function of a mean over examples: each example has a sum and a count.

    Its values on the clients' own splits are sums over rows, which are computed once for all clients.
    """

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum and the count of each example, [batch] each: (1 for a right answer or 0, 1) for accuracy."""

    def of_mean(self, mean: float) -> float:
        """The value of a mean; the mean itself by default."""
        return mean

    def measure(self, outputs: Tensor, targets: Tensor) -> MetricSums:
        sums, counts = self.each(outputs, targets)
        return {"sum": sums.double().sum(), "count": counts.double().sum()}

    def value(self, sums: MetricSums) -> MetricValues:
        mean = ratio(float(sums["sum"]), float(sums["count"]))
        return {self.value_name: None if mean is None else self.of_mean(mean)}


def measured(metric: Metric, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> MetricSums:
    """A metric's sums of a batch. Rows with weight 0 are padding and add nothing."""
    if weights is None:
        return metric.measure(outputs, targets)
    kept = weights > 0
    return metric.measure(outputs[kept], targets[kept])


def are_finite(sums: Mapping[str, Tensor | np.ndarray]) -> bool:
    """Whether no sum, in main memory, is NaN or infinite: a NaN made of such sums is undefined, and does not come from
    a model that has diverged."""
    return all(bool(np.isfinite(np.asarray(total)).all()) for total in sums.values())


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None for 0 / 0."""
    return part / whole if whole else None


def sizes(outputs: Tensor) -> int:
    """The number of classes, labels or numbers: the last side of the outputs."""
    return outputs.shape[-1] if outputs.ndim > 1 else 1
