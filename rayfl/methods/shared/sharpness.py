"""Gradients at a point uphill of the model: sharpness-aware minimisation (SAM; Foret et al., ICLR 2021) at the clients.

Subclasses say how far they look (`rho` of their settings) and what else a step goes along (`direction`).
"""

import torch

from rayfl.methods.base import Batch, Context, Field, HyperParameters, Stage, Tree
from rayfl.methods.shared.local_training import GradientMethod, Training


class Sharpness(HyperParameters):
    """The setting of sharpness-aware methods."""

    rho: float = Field(default=0.1, ge=0, description="distance to the point at which a step takes its gradient, rho")


def ascended(params: Tree, along: Tree, rho: float) -> Tree:
    """params + rho along / (||along|| + 1e-12), with the norm over all entries; safe under vmap."""
    square = torch.stack([tensor.square().sum() for tensor in along.values()]).sum()
    factor = rho / (square.sqrt() + 1e-12)
    return {name: tensor + factor * along[name] for name, tensor in params.items()}


class SharpnessAware(GradientMethod):
    """A client whose steps go along g_i(y + rho g / ||g||), with g = g_i(y) on the same batch. Two gradients a step."""

    hyper: Sharpness

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 2.0 if stage.split == "train" else 0.0

    def step(self, carry: Training, batch: Batch, *, stage: Stage) -> Training:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        uphill = self.task.grad(ascended(carry["params"], gradient, self.hyper.rho), batch)
        return self.descend(carry, loss, self.direction(carry, self.mixed(gradient, uphill)), stage)

    def mixed(self, gradient: Tree, uphill: Tree) -> Tree:
        """The gradient of a step, from that at the model and that at the point uphill: the second by default."""
        return uphill
