"""The full gradient of a client: a stage that passes over its examples once, at the model that it received."""

from typing import TypedDict, TypeVar, cast

import torch

from rayfl.methods.base import Batch, Tree, tree

MEASURE = "full gradient"
"""The stage that adds up the client's full gradient at x."""


class GradientSum(TypedDict):
    """A part of a client's carry."""

    gradients: Tree  # the sum of the gradients at x of all examples so far
    seen: torch.Tensor  # the number of these examples, float32 []


Measuring = TypeVar("Measuring", bound=GradientSum)
"""The carry of a method that adds to `GradientSum`."""


def no_gradient(params: Tree) -> GradientSum:
    """The sum before the first batch."""
    return {"gradients": tree.zeros_like(params), "seen": torch.zeros(())}


def with_batch(carry: Measuring, gradient: Tree, batch: Batch) -> Measuring:
    """The carry with the gradients of one more batch; `gradient` is the mean over its examples."""
    number = batch.without_padding(carry["seen"].new_ones(len(batch.labels))).sum()
    gradients = {name: total + number * gradient[name] for name, total in carry["gradients"].items()}
    return cast(Measuring, {**carry, "gradients": gradients, "seen": carry["seen"] + number})


def mean_gradient(carry: GradientSum) -> Tree:
    """The full gradient."""
    return tree.map(lambda total: total / carry["seen"], carry["gradients"])
