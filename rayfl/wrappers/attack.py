"""Attacks on the server's mean, or on the neighbours', by a share of the clients."""

from collections.abc import Mapping
from typing import Literal

import torch

from rayfl.methods.base import Context, Field, Metrics, State, Tree, tree
from rayfl.population.sampling import attackers
from rayfl.wrappers.base import MessageWrapper


class Attack(MessageWrapper):
    """A share of the clients, drawn once from the seed, sends false messages.

    sign-flip: -strength times the true message. gaussian: normal numbers of standard deviation `strength` instead
    (Blanchard et al., NeurIPS 2017). scale: strength times the true message (Bagdasaryan et al., AISTATS 2020). The
    attackers' own states are those of honest clients. Counts beside the trees are true. `data.flipped_clients` flips
    labels instead.
    """

    name = "attack"
    leaves_encoded = True
    kind: Literal["sign-flip", "gaussian", "scale"] = Field(default="sign-flip", description="what attackers send")
    share: float = Field(default=0.2, gt=0, lt=1, description="share of the clients that attack")
    strength: float = Field(default=1.0, gt=0, description="factor of the message, or deviation of the noise")

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        attacks = ctx.traits.id in attackers(ctx.seed, ctx.num_clients, self.share)
        if attacks and self.kind == "gaussian":
            trees = {name: noise(update, self.strength, ctx) for name, update in trees.items()}
        elif attacks:
            factor = self.strength if self.kind == "scale" else -self.strength
            trees = {name: tree.scale(update, factor) for name, update in trees.items()}
        return trees, state, {"attack/share": float(attacks)}


def noise(like: Tree, deviation: float, ctx: Context) -> Tree:
    """Normal numbers of mean 0 and this standard deviation, float32 in the shapes of `like`, from `ctx.generator`."""
    return {
        name: torch.from_numpy(ctx.generator.normal(0.0, deviation, tuple(tensor.shape)).astype("float32"))
        for name, tensor in like.items()
    }
