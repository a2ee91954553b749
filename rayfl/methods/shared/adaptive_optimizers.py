"""Adaptive optimizers of servers, as pure functions: Reddi et al., Adaptive Federated Optimization, ICLR 2021,
Algorithm 2.

They have no bias correction; instead the second moment starts at tau^2, the square of what is added to its root.
"""

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.methods.shared.optimizers import Optimizer
from rayfl.tree import State, Tree

SecondMoment = Literal["momentum", "raw"]


class Adaptive(Optimizer):
    """d <- beta1 d + (1 - beta1) g; v <- `accumulate`(v, d^2); x <- x - lr d / (sqrt(v) + tau).

    `second_moment="raw"` squares g in place of d. State: "mean" is d, 0 at first, and "square" is v, tau^2 at first.
    """

    beta1: float = Field(default=0.9, ge=0, lt=1, description="share of the mean that a step keeps")
    tau: float = Field(default=1e-3, gt=0, description="added to the root of the second moment")
    second_moment: SecondMoment = Field(default="momentum", description="what is squared: the mean, or the gradient")

    @abstractmethod
    def accumulate(self, square: Tensor, new: Tensor) -> Tensor:
        """The second moment after one more square, entry by entry."""

    def init(self, params: Tree) -> State:
        start = tree.map(lambda tensor: torch.full_like(tensor, self.tau**2), params)
        return {"mean": tree.zeros_like(params), "square": start}

    def update(self, params: Tree, gradient: Tree, state: State, lr: float) -> tuple[Tree, State]:
        gradient = self.penalised(gradient, params)
        mean = tree.add(tree.scale(state["mean"], self.beta1), gradient, 1 - self.beta1)
        squared = mean if self.second_moment == "momentum" else gradient
        square = {name: self.accumulate(old, squared[name].square()) for name, old in state["square"].items()}
        params = {name: params[name] - lr * mean[name] / (square[name].sqrt() + self.tau) for name in params}
        return params, {"mean": mean, "square": square}


class Adagrad(Adaptive):
    """v <- v + d^2."""

    name: ClassVar[str] = "adagrad"

    def accumulate(self, square: Tensor, new: Tensor) -> Tensor:
        return square + new


class AdaptiveAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) d^2."""

    name: ClassVar[str] = "adam"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="share of the second moment that a step keeps")

    def accumulate(self, square: Tensor, new: Tensor) -> Tensor:
        return self.beta2 * square + (1 - self.beta2) * new


class Yogi(Adaptive):
    """v <- v - (1 - beta2) d^2 sign(v - d^2), which never falls below 0."""

    name: ClassVar[str] = "yogi"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="1 - beta2 is how much of d^2 v moves by")

    def accumulate(self, square: Tensor, new: Tensor) -> Tensor:
        return square - (1 - self.beta2) * new * torch.sign(square - new)
