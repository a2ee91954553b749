"""Clients whose round is one gradient, which `finish` uses."""

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar, cast

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

    # Any: see Method.
    @classmethod
    def unused(cls, hyper: Any) -> Mapping[str, str]:
        return {**super().unused(hyper), "clients.work": f"as clients of {cls.__name__} do one step a round"}

    def step(self, carry: OneStep, batch: Batch, *, stage: Stage) -> OneStep:
        loss, gradient = self.value_and_grad(carry["params"], batch)
        return cast(OneStep, {**carry, "gradient": gradient, "loss": loss})

    def value_and_grad(self, params: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        """The objective's value (scalar) and its gradient."""
        return self.task.value_and_grad(params, batch)
