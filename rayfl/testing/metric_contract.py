"""The contract of every metric: its sums do not depend on how examples are cut up, and padding adds nothing."""

import pickle

import numpy as np
import torch
from torch import Tensor

from rayfl.choices.kinds import resolve
from rayfl.metrics.base import Metric, Sums, Targets, measured
from rayfl.metrics.check import checked_facts

NUM_EXAMPLES, NUM_CLASSES = 240, 6


class CrossEntropy:
    """A task, as far as metrics need it."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy, or the squared error of targets that are no classes."""
        if targets.is_floating_point():
            losses = (outputs - targets).square().mean(dim=1)
        else:
            losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses, torch.ones_like(losses)


def examples(kind: Targets, seed: int) -> tuple[Tensor, Tensor]:
    """Random outputs [240, 6] and targets that they partly hit."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(NUM_EXAMPLES, NUM_CLASSES, generator=generator)
    noisy = outputs + 2 * torch.randn(NUM_EXAMPLES, NUM_CLASSES, generator=generator)
    return outputs, {"classes": noisy.argmax(dim=1), "labels": (noisy > 0).float(), "numbers": noisy}[kind]


def any_split_gives_the_same_value(metric: Metric, outputs: Tensor, targets: Tensor, seed: int) -> None:
    """Clients and batches of any sizes: integer sums bit for bit, others up to rounding."""
    whole, generator = metric.measure(outputs, targets), np.random.default_rng(seed)
    order = torch.from_numpy(generator.permutation(len(outputs)))
    cuts = np.sort(generator.integers(0, len(outputs), 7)).tolist()
    total: dict[str, Tensor] = {}
    for rows in torch.tensor_split(order, cuts):
        for name, value in metric.measure(outputs[rows], targets[rows]).items():
            total[name] = total[name] + value if name in total else value
    assert total.keys() == whole.keys()
    for name, value in whole.items():
        assert value.dtype in (torch.int64, torch.float64) and total[name].dtype == value.dtype
        torch.testing.assert_close(total[name], value, rtol=1e-9, atol=1e-9)
        assert value.is_floating_point() or bool((total[name] == value).all())
    one, other = metric.value(whole), metric.value(total)
    assert one.keys() == other.keys()
    integer = not any(value.is_floating_point() for value in whole.values())
    for name, value in one.items():
        found = other[name]
        assert (value is None) == (found is None)
        if value is not None and found is not None:
            assert found == value if integer else abs(found - value) <= 1e-7 * max(1.0, abs(value)), name


def padding_adds_nothing(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Rows of weight 0, whatever they hold, change no bit of the sums."""
    padded = torch.cat([outputs, torch.full_like(outputs[:5], torch.nan)])
    more = torch.cat([targets, targets[:5]])
    weights = (torch.arange(len(padded)) < len(outputs)).float()
    assert same_bits(measured(metric, padded, more, weights), metric.measure(outputs, targets))


def values_keep_their_names_and_range(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Also without examples, where nothing may be made up: no value is finite that was divided by 0."""
    facts = checked_facts([metric], outputs, targets)
    values = metric.value(metric.measure(outputs, targets))
    empty = metric.value(metric.measure(outputs[:0], targets[:0]))
    assert values.keys() == empty.keys() == facts.keys()
    for name, value in values.items():
        assert value is None or facts[name].drawn or facts[name].holds(value), name
        assert facts[name].title and (facts[name].drawn or empty[name] is None), name


def a_pickled_metric_measures_the_same(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Actors get metrics as bytes."""
    twin = pickle.loads(pickle.dumps(metric))  # noqa: S301 (made here)
    assert twin.to_table() == metric.to_table() and resolve(Metric, metric.to_table()).to_table() == metric.to_table()
    bound = twin.for_data(CrossEntropy(), targets)
    assert same_bits(bound.measure(outputs, targets), metric.measure(outputs, targets))


def same_bits(one: Sums, other: Sums) -> bool:
    """Whether sums are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
