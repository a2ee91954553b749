"""Accuracy on a validation split, counted batch by batch in a stage, after which a client decides whether it prunes."""

from typing import TypedDict, TypeVar, cast

import torch
from torch import Tensor

from rayfl.data.batches import Batch
from rayfl.task import Task
from rayfl.tree import Tree


class Counters(TypedDict):
    """The counters' part of a carry."""

    correct: Tensor  # examples that the model gets right
    evaluated: Tensor  # all examples


Gated = TypeVar("Gated", bound=Counters)
"""The carry of a method with a gate."""


def nothing_counted() -> Counters:
    """The counters' part of a carry before the first batch."""
    return {"correct": torch.zeros(()), "evaluated": torch.zeros(())}


def counted(carry: Gated, task: Task, params: Tree, batch: Batch) -> Gated:
    """The carry after the examples of `batch` are counted, and those that `params` gets right; safe under vmap."""
    right: Tensor = task.metrics(params, batch)["accuracy"]
    weights = torch.ones_like(right) if batch.weights is None else batch.weights
    correct = carry["correct"] + (right * weights).sum()
    return cast(Gated, {**carry, "correct": correct, "evaluated": carry["evaluated"] + weights.sum()})


def accuracy(carry: Counters) -> float:
    """The share of right answers; 0 if nothing was counted."""
    return float(carry["correct"]) / max(1.0, float(carry["evaluated"]))
