"""Clients whose round is one gradient, which `finish` uses."""

from typing import TypedDict, TypeVar, cast

from torch import Tensor

from rayfl.methods.base import Batch, Method, Stage, Tree


class GradientCarry(TypedDict):
    """The carry of a client that computes one gradient."""

    params: Tree
    gradient: Tree  # at params, after the step
    loss: Tensor


OneStep = TypeVar("OneStep", bound=GradientCarry)
"""The carry of a method that adds to `GradientCarry`."""


class OneGradient(Method):
    """A client whose one step stores the gradient and leaves the model alone."""

    def step(self, carry: OneStep, batch: Batch, *, stage: Stage) -> OneStep:
        loss, gradient = self.value_and_grad(carry["params"], batch)
        return cast(OneStep, {**carry, "gradient": gradient, "loss": loss})

    def value_and_grad(self, params: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        """The objective's value (scalar) and its gradient."""
        return self.task.value_and_grad(params, batch)
