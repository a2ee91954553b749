"""Metrics of the package torchmetrics (extra `metrics`) whose states are sums."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError, one_line
from rayfl.metrics.base import Metric, Sums, Targets, Values
from rayfl.metrics.facts import Facts


class TorchMetrics(Metric):
    """A metric of the package torchmetrics, as {name = "torchmetrics", metric = "classification.MulticlassCohenKappa",
    options = {num_classes = 10}}.

    It gets the network's outputs and the targets as they are. Its states must be sums (`dist_reduce_fx="sum"`), which
    are kept as int64 or float64; a metric that keeps lists of all outputs is refused.
    """

    name = "torchmetrics"
    judges: ClassVar[tuple[Targets, ...]] = ("classes", "labels", "numbers")

    metric: str = Field(
        min_length=1,
        examples=["classification.MulticlassCohenKappa"],
        description="a class of torchmetrics, with its subpackage: classification.MulticlassCohenKappa",
    )
    # Any: whatever the class takes.
    options: Mapping[str, Any] = Field(default_factory=dict, description="arguments of the class")
    # Any: torchmetrics is imported where it is used.
    _made: Any = PrivateAttr(default=None)

    # Any: an object of torchmetrics.
    @property
    def made(self) -> Any:
        """The metric of torchmetrics. Raise RayflError if there is none, or if its states are no sums."""
        if self._made is None:
            self._made = self._make()
        return self._made

    # Any: see `made`.
    def _make(self) -> Any:
        # torchmetrics imports torchvision, which some builds of torch refuse without this.
        torchvision()
        try:
            package = importlib.import_module("torchmetrics")
        except ModuleNotFoundError:
            raise RayflError("torchmetrics is not installed: run `pip install 'rayfl[metrics]'`") from None
        room, _, name = self.metric.rpartition(".")
        module = getattr(package, room, None) if room else package
        kind = getattr(module, name, None)
        if not isinstance(kind, type) or not issubclass(kind, package.Metric):
            close = difflib.get_close_matches(name, dir(module or package), n=1)
            cure = f"did you mean {close[0]!r}?" if close else "give one as classification.MulticlassCohenKappa"
            raise RayflError(f"={self.metric!r} is no metric of torchmetrics; {cure}", ("metric",))
        try:
            made = kind(**self.options)
        except Exception as error:
            raise RayflError(one_line(f" of {self.metric} are refused: {error}"), ("options",)) from error
        wrong = [state for state, rule in made._reductions.items() if getattr(rule, "__name__", "") != "dim_zero_sum"]
        if wrong or not made._reductions:
            raise RayflError(
                f"={self.metric!r} keeps {wrong[0] if wrong else 'nothing'!r}, which is no sum; choose a metric whose "
                "states are sums, for example with thresholds instead of curves",
                ("metric",),
            )
        return made.set_dtype(torch.float64)

    def check(self, targets: Targets, outputs: Tensor) -> None:
        assert self.made

    def measure(self, outputs: Tensor, targets: Tensor) -> Sums:
        made = self.made.to(outputs.device)
        made.reset()
        made.update(outputs, targets)
        states = {name: getattr(made, name) for name in made._reductions}
        return {
            name: state.double() if state.is_floating_point() else state.to(torch.int64)
            for name, state in states.items()
        }

    def value(self, sums: Sums) -> Values:
        made = self.made.to("cpu")
        made.reset()
        for name, total in sums.items():
            setattr(made, name, total)
        made._update_count = 1
        found = torch.as_tensor(made.compute()).detach().double().reshape(-1)
        numbers = [None if torch.isnan(number) else float(number) for number in found]
        name = self.value_name
        return (
            {name: numbers[0]} if len(numbers) == 1 else {f"{name}/{place}": one for place, one in enumerate(numbers)}
        )

    @property
    def value_name(self) -> str:
        """multiclass_cohen_kappa for classification.MulticlassCohenKappa."""
        name = self.metric.rpartition(".")[2]
        return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")

    def facts(self, name: str) -> Facts:
        higher = self.made.higher_is_better
        ranks = "/" not in name and higher is not None
        return super().facts(name).model_copy(update={"higher_is_better": higher, "ranks": ranks})
