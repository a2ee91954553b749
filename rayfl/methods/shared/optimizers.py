"""Optimizers as pure functions: `init` makes the state, `update` gives new parameters and a new state.

They run unchanged under vmap: no data-dependent branches, no in-place writes. Torch's own functional forms
(`torch.optim.adamw.adamw`) read their count of steps by `.item()`, which vmap refuses; tests compare with them.
"""

from abc import abstractmethod
from typing import Literal

import torch

from rayfl.methods.base import Field, tree
from rayfl.settings import Settings

OptimizerName = Literal["sgd", "nesterov", "adam", "adamw"]


class Optimizer(Settings):
    """A rule that turns parameters and a gradient into new parameters."""

    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty added to the gradient")

    @abstractmethod
    def init(self, params: tree.Tree) -> tree.State:
        """The optimizer's state before the first step of a round."""

    @abstractmethod
    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        """One step of size `lr`; returns the new parameters and the new state."""

    def update_last(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        """`update` for a caller who alone has the gradient and reads it no more: its memory may be the result's."""
        return self.update(params, gradient, state, lr)

    def penalised(self, gradient: tree.Tree, params: tree.Tree) -> tree.Tree:
        """The gradient with that of the L2 penalty."""
        return tree.add(gradient, params, self.weight_decay) if self.weight_decay else gradient


class SGD(Optimizer):
    """v <- momentum * v + g, x <- x - lr * v (torch.optim.SGD without dampening); plain x - lr * g without momentum."""

    momentum: float = Field(default=0.0, ge=0, lt=1, description="heavy-ball momentum")

    def init(self, params: tree.Tree) -> tree.State:
        return {"velocity": tree.zeros_like(params)} if self.momentum else {}

    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        gradient = self.penalised(gradient, params)
        if self.momentum:
            gradient = tree.add(gradient, state["velocity"], self.momentum)
            state = {"velocity": gradient}
        return tree.add(params, gradient, -lr), state

    def update_last(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        # On a GPU one operation makes all new parameters.
        if self.momentum or tree.at_once(params) or not tree.is_writable(gradient, params):
            return self.update(params, gradient, state, lr)
        gradient = self.penalised(gradient, params)
        with torch.no_grad():
            return {name: torch.add(params[name], g, alpha=-lr, out=g) for name, g in gradient.items()}, state


class Nesterov(SGD):
    """v <- momentum * v + g, x <- x - lr * (g + momentum * v): torch.optim.SGD with nesterov=True."""

    momentum: float = Field(default=0.9, gt=0, lt=1, description="Nesterov's momentum")

    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        gradient = self.penalised(gradient, params)
        velocity = tree.add(gradient, state["velocity"], self.momentum)
        return tree.add(params, tree.add(gradient, velocity, self.momentum), -lr), {"velocity": velocity}


class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba, 2015; torch.optim.Adam), weight decay added to the gradient."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)

    def init(self, params: tree.Tree) -> tree.State:
        # In float32, 1 - 0.999 would be wrong in the fifth digit.
        count = torch.zeros((), dtype=torch.float64)
        return {"mean": tree.zeros_like(params), "square": tree.zeros_like(params), "count": count}

    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        gradient = self.penalised(gradient, params)
        mean = tree.add(tree.scale(state["mean"], self.beta1), gradient, 1 - self.beta1)
        square = tree.add(tree.scale(state["square"], self.beta2), tree.mul(gradient, gradient), 1 - self.beta2)
        count = state["count"] + 1
        first, second = 1 - self.beta1**count, 1 - self.beta2**count

        def step(name: str) -> torch.Tensor:
            return params[name] - lr * (mean[name] / first) / ((square[name] / second).sqrt() + self.epsilon)

        # A parameter without dimensions would become float64, which the count is.
        moved = {name: step(name).to(tensor.dtype) for name, tensor in params.items()}
        return moved, {"mean": mean, "square": square, "count": count}


class AdamW(Adam):
    """Adam whose weight decay is decoupled from the gradient, x <- (1 - lr * weight_decay) x before the step
    (Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019; torch.optim.AdamW)."""

    def penalised(self, gradient: tree.Tree, params: tree.Tree) -> tree.Tree:
        """The gradient alone."""
        return gradient

    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        decayed = tree.scale(params, 1 - lr * self.weight_decay) if self.weight_decay else params
        return super().update(decayed, gradient, state, lr)


SecondMoment = Literal["momentum", "raw"]


class Adaptive(Optimizer):
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2, for servers.

    d <- beta1 d + (1 - beta1) g; v <- `accumulate`(v, d^2); x <- x - lr d / (sqrt(v) + tau).

    `second_moment="raw"` squares g in place of d. State: "mean" is d, 0 at first, and "square" is v, tau^2 at first.
    """

    beta1: float = Field(default=0.9, ge=0, lt=1, description="share of the mean that a step keeps")
    tau: float = Field(default=1e-3, gt=0, description="added to the root of the second moment")
    second_moment: SecondMoment = Field(default="momentum", description="what is squared: the mean, or the gradient")

    @abstractmethod
    def accumulate(self, square: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The second moment after one more square, entry by entry."""

    def init(self, params: tree.Tree) -> tree.State:
        start = tree.map(lambda tensor: torch.full_like(tensor, self.tau**2), params)
        return {"mean": tree.zeros_like(params), "square": start}

    def update(
        self, params: tree.Tree, gradient: tree.Tree, state: tree.State, lr: float
    ) -> tuple[tree.Tree, tree.State]:
        gradient = self.penalised(gradient, params)
        mean = tree.add(tree.scale(state["mean"], self.beta1), gradient, 1 - self.beta1)
        squared = mean if self.second_moment == "momentum" else gradient
        square = {name: self.accumulate(old, squared[name].square()) for name, old in state["square"].items()}
        params = {name: params[name] - lr * mean[name] / (square[name].sqrt() + self.tau) for name in params}
        return params, {"mean": mean, "square": square}


class Adagrad(Adaptive):
    """v <- v + d^2."""

    def accumulate(self, square: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return square + new


class AdaptiveAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) d^2."""

    beta2: float = Field(default=0.99, ge=0, lt=1, description="share of the second moment that a step keeps")

    def accumulate(self, square: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return self.beta2 * square + (1 - self.beta2) * new


class Yogi(Adaptive):
    """v <- v - (1 - beta2) d^2 sign(v - d^2), which never falls below 0."""

    beta2: float = Field(default=0.99, ge=0, lt=1, description="1 - beta2 is how much of d^2 v moves by")

    def accumulate(self, square: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return square - (1 - self.beta2) * new * torch.sign(square - new)
