"""The contract of every metric: its sums do not depend on how examples are cut up, and padding adds nothing."""

import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import resolve
from rayfl.metrics.base import Metric, MetricSums, Targets, measured
from rayfl.metrics.check import checked_facts
from rayfl.tasks.base import Task
from rayfl.tasks.supervised import Classification, Regression

NUM_EXAMPLES, NUM_CLASSES = 240, 6


def task_for(targets: torch.Tensor) -> Task:
    """A task that takes these targets."""
    return Regression() if targets.is_floating_point() else Classification()


def examples(kind: Targets, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random outputs [240, 6] and targets that they partly hit."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(NUM_EXAMPLES, NUM_CLASSES, generator=generator)
    noisy = outputs + 2 * torch.randn(NUM_EXAMPLES, NUM_CLASSES, generator=generator)
    return outputs, {"classes": noisy.argmax(dim=1), "labels": (noisy > 0).float(), "numbers": noisy}[kind]


def any_split_gives_the_same_value(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, seed: int = 1) -> None:
    """The sums do not depend on how examples are divided: integer sums bit for bit, others up to rounding."""
    undivided = metric.measure(outputs, targets)
    generator = np.random.default_rng(seed)
    order = torch.from_numpy(generator.permutation(len(outputs)))
    parts = torch.tensor_split(order, np.sort(generator.integers(0, len(outputs), 7)).tolist())
    sums = [metric.measure(outputs[rows], targets[rows]) for rows in parts]
    assert all(part_sums.keys() == undivided.keys() for part_sums in sums)
    total = {
        name: torch.stack(torch.broadcast_tensors(*(part_sums[name] for part_sums in sums))).sum(dim=0)
        for name in undivided
    }
    assert {value.dtype for part_sums in (undivided, *sums) for value in part_sums.values()} <= {
        torch.int64,
        torch.float64,
    }
    for name, value in undivided.items():
        tolerance = 1e-9 if value.is_floating_point() else 0.0
        torch.testing.assert_close(total[name], value, rtol=tolerance, atol=tolerance)
    tolerance = 1e-7 if any(value.is_floating_point() for value in undivided.values()) else 0.0
    divided_values, undivided_values = (
        {name: math.nan if value is None else value for name, value in metric.value(all_sums).items()}
        for all_sums in (total, undivided)
    )
    assert divided_values == pytest.approx(undivided_values, rel=tolerance, abs=tolerance, nan_ok=True)


def padding_adds_nothing(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Rows of weight 0 do not change a bit of the sums, whatever their values are."""
    padded = torch.cat([outputs, torch.full_like(outputs[:5], torch.nan)]), torch.cat([targets, targets[:5]])
    weights = (torch.arange(len(padded[0])) < len(outputs)).float()
    assert same_bits(measured(metric, *padded, weights), metric.measure(outputs, targets))


def values_keep_their_names_and_range(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Values have the same names for any examples, and lie in their range; without examples they are undefined."""
    facts = checked_facts([metric], outputs, targets)
    values = metric.value(metric.measure(outputs, targets))
    empty = metric.value(metric.measure(outputs[:0], targets[:0]))
    assert values.keys() == empty.keys() == facts.keys()
    for name, value in values.items():
        assert value is None or facts[name].drawn or facts[name].holds(value), name
        assert facts[name].title and (facts[name].drawn or empty[name] is None), name


def a_pickled_metric_measures_the_same(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """A metric gives the same sums after pickling, because actors get metrics as bytes."""
    copied = pickle.loads(pickle.dumps(metric))  # noqa: S301 (made here)
    assert copied.to_table() == metric.to_table() and resolve(Metric, metric.to_table()).to_table() == metric.to_table()
    assert same_bits(
        copied.for_data(task_for(targets), targets).measure(outputs, targets), metric.measure(outputs, targets)
    )


def same_bits(sums: MetricSums, other: MetricSums) -> bool:
    """Whether sums are equal, bit for bit."""
    return sums.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in sums.items())


Holds = Callable[[Metric, torch.Tensor, torch.Tensor], None]
CONTRACT: tuple[Holds, ...] = (
    any_split_gives_the_same_value,
    padding_adds_nothing,
    values_keep_their_names_and_range,
    a_pickled_metric_measures_the_same,
)
