"""Checks the metrics of an experiment before it starts, and finds the facts of their values."""

from collections.abc import Mapping, Sequence
from numbers import Real

import torch

from rayfl.errors import RayflError, one_line, plugin_line
from rayfl.metrics.base import Facts, Metric, MetricSums, MetricValues, PerExample
from rayfl.metrics.loss import Loss
from rayfl.metrics.targets import kind_of
from rayfl.settings import shown


def checked_facts(
    metrics: Sequence[Metric], outputs: torch.Tensor, targets: torch.Tensor, with_loss: bool = True
) -> dict[str, Facts]:
    """The facts of every value, by its name.

    outputs: a network's for the first n examples, [n, ...]; targets: all of the experiment, [m, ...]. with_loss: False
    if these are the predictions among a network's outputs, of which the task has no loss. Raise RayflError,
    which names evaluation.metrics, for a metric that cannot evaluate them, that fails on them, whose values are not
    numbers (for these examples, or for none), or have the name of another metric's value.
    """
    kind = kind_of(outputs, targets) if isinstance(outputs, torch.Tensor) else "numbers"
    facts = dict[str, Facts]()
    for metric in metrics:
        try:
            names = [metric.value_name]
            if with_loss or not isinstance(metric, Loss):
                metric.check(kind, outputs)
                names = _values(metric, outputs, targets[: len(outputs)])
            for name in names:
                if name in facts:
                    raise RayflError(f"two metrics have a value {name!r}; remove one, or give it another name")
                facts[name] = metric.facts(name)
        except RayflError as error:
            raise error.under("metrics").under("evaluation") from None
    return facts


def _values(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor) -> MetricValues:
    """The values of a few examples."""
    what = f"metric {type(metric).__name__!r}"
    try:
        if isinstance(metric, PerExample) and any(
            tensor.shape != outputs.shape[:1] for tensor in metric.each(outputs, targets)
        ):
            raise RayflError(f"{what}: each must give a sum and a count for each example, of shape {[len(outputs)]}")
        sums, fewer = (metric.measure(outputs[:count], targets[:count]) for count in (len(outputs), 1))
        values = metric.value({name: total.cpu() for name, total in sums.items()})
        empty = metric.value({name: torch.zeros_like(total, device="cpu") for name, total in sums.items()})
    except (RayflError, KeyboardInterrupt):
        raise
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}{plugin_line(error)}"
        raise RayflError(one_line(f"{what} fails on outputs {list(outputs.shape)}: {fault}")) from error
    for name, total in sums.items():
        if total.dtype not in (torch.int64, torch.float64):
            raise RayflError(f"{what} measures {name!r} as {total.dtype}; it must be int64 or float64")
    if _shapes(sums) != _shapes(fewer):
        raise RayflError(
            f"{what} measures {_shapes(sums)} for {len(outputs)} examples and {_shapes(fewer)} for one; shapes must be "
            "the same for any number"
        )
    for name, value in [*empty.items(), *(values.items() if bool(outputs.isfinite().all()) else ())]:
        if value is not None and (not isinstance(value, Real) or value != value):
            raise RayflError(
                f"{what} gives {shown(value)} as its value {name!r}; give a number, or None where it is undefined"
            )
    if values.keys() != empty.keys() or not values:
        raise RayflError(f"{what} has the values {[*values]} for some examples and {[*empty]} for none; give the same")
    return values


def _shapes(sums: MetricSums) -> Mapping[str, list[int]]:
    return {name: list(total.shape) for name, total in sums.items()}
