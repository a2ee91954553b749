"""Metrics of the package torchmetrics (extra `metrics`) whose states are sums."""

import difflib
import importlib
import re
from collections.abc import Mapping
from functools import cached_property

import torch
from pydantic import Field

from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError, one_line
from rayfl.metrics.base import Facts, MetricSums, MetricValues, Targets
from rayfl.metrics.per_class import ByName
from rayfl.untyped import Foreign, Value

_NEW_WORD = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
"""Where a word begins inside the name of a class."""


class TorchMetrics(ByName):
    """A metric of the package torchmetrics, as {name = "torchmetrics", metric = "classification.MulticlassCohenKappa",
    options = {num_classes = 10}}.

    It gets the network's outputs and the targets unchanged. Its states must be sums (`dist_reduce_fx="sum"`), which
    are kept as int64 or float64; a metric that keeps lists of all outputs is refused. Its direction, its best possible
    value and its description come from its class; shares of counts have both bounds, and are shown in percent.
    """

    name = "torchmetrics"
    takes_targets = ("classes", "labels", "numbers")

    metric: str = Field(
        min_length=1,
        examples=["classification.MulticlassCohenKappa"],
        description="a class of torchmetrics, with its subpackage: classification.MulticlassCohenKappa",
    )
    options: Mapping[str, Value] = Field(default_factory=dict, description="arguments of the class")

    @cached_property
    def made(self) -> Foreign:
        """The metric of torchmetrics. Raise RayflError if there is no such metric, or if its states are not sums."""
        # torchmetrics imports torchvision, which some builds of torch refuse without this.
        torchvision()
        try:
            package = importlib.import_module("torchmetrics")
        except ModuleNotFoundError:
            raise RayflError("torchmetrics is not installed: run `pip install 'rayfl[metrics]'`") from None
        subpackage, _, name = self.metric.rpartition(".")
        module = getattr(package, subpackage, None) if subpackage else package
        kind = getattr(module, name, None)
        if not isinstance(kind, type) or not issubclass(kind, package.Metric):
            close = difflib.get_close_matches(name, dir(module or package), n=1)
            cure = f"did you mean {close[0]!r}?" if close else "give one as classification.MulticlassCohenKappa"
            raise RayflError(f"={self.metric!r} is not a metric of torchmetrics; {cure}", ("metric",))
        try:
            metric = kind(**self.options)
        except Exception as error:
            raise RayflError(one_line(f" of {self.metric} are refused: {error}"), ("options",)) from error
        wrong = [state for state, rule in metric._reductions.items() if getattr(rule, "__name__", "") != "dim_zero_sum"]
        if wrong or not metric._reductions:
            raise RayflError(
                f"={self.metric!r} keeps {wrong[0] if wrong else 'nothing'!r}, which is not a sum; choose a metric "
                "whose states are sums, for example with thresholds instead of curves",
                ("metric",),
            )
        return metric.set_dtype(torch.float64)

    def check(self, targets: Targets, outputs: torch.Tensor) -> None:
        self.made.reset()

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        metric = self.made.to(outputs.device)
        metric.reset()
        # Sums in float32 would depend on how examples are divided into batches.
        if len(outputs):
            metric.update(outputs.double(), targets.double() if targets.is_floating_point() else targets)
        states = {name: getattr(metric, name) for name in metric._reductions}
        return {
            name: state.double() if state.is_floating_point() else state.to(torch.int64)
            for name, state in states.items()
        }

    def value(self, sums: MetricSums) -> MetricValues:
        metric = self.made.to("cpu")
        metric.reset()
        for name, total in sums.items():
            setattr(metric, name, total)
        metric._update_count = 1
        try:
            computed = metric.compute()
        except ValueError:
            # Some metrics raise it if there are too few examples for a value.
            computed = torch.nan
        values = torch.as_tensor(computed).detach().double().reshape(-1)
        numbers = [None if torch.isnan(value) else float(value) for value in values]
        name = self.value_name
        if len(numbers) == 1:
            return {name: numbers[0]}
        return {f"{name}/{part}": value for part, value in zip(self.names(len(numbers)), numbers, strict=True)}

    @property
    def value_name(self) -> str:
        """multiclass_auroc for classification.MulticlassAUROC, r2_score for regression.R2Score."""
        return re.sub(_NEW_WORD, "_", self.metric.rpartition(".")[2]).lower()

    def facts(self, name: str) -> Facts:
        metric = self.made
        higher = metric.higher_is_better
        part = name.partition("/")[2]
        title = re.sub(_NEW_WORD, " ", self.metric.rpartition(".")[2])
        # The first sentence, without the marks of reStructuredText.
        about = re.split(r"\.\s", re.sub("`_?", "", f"{metric.__doc__}\n"))[0].replace("_", " ")
        # A class states the bounds of its plots, which may be narrower than its values: agreement may be negative.
        is_share = metric.plot_upper_bound == 1 and {"tp", "fp", "tn", "fn"} <= metric._reductions.keys()
        return Facts(
            title=f"{title}: {part}" if part else title,
            meaning=re.sub("^(Compute|Calculate)s?( the)? ", "The ", " ".join(about.split())),
            unit="%" if is_share else "",
            low=metric.plot_lower_bound if is_share or higher is False else None,
            high=metric.plot_upper_bound if is_share or higher else None,
            higher_is_better=higher,
            ranks=not part and higher is not None,
        )
