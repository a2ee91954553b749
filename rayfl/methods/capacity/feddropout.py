"""Federated Dropout: Caldas, Konecny, McMahan, Talwalkar, Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements, arXiv 1812.07210, 2018.

In every round each client trains a sub-model of units drawn at random: the same number of units per layer, without
replacement, ascending. The server averages each entry over the clients that held it; the full model is deployed.

- One draw for each group of units that layers share, so that a residual sum adds a unit to itself. The draws follow
  from a seed of 64 bits, which each message carries.
- The paper drops the units of fully connected layers and the filters of convolutions; ours also those of recurrent
  layers, attention and embeddings, by the same rule.
- `same_for_all`: one draw a round for all clients of a ratio.
"""

from typing import Literal

import numpy as np

from rayfl.determinism.seeding import NOBODY, torch_seed
from rayfl.methods.base import Capabilities, Context, Field
from rayfl.methods.shared.sub_models import DrawnRatios, SubModels


class FedDropoutHyper(DrawnRatios):
    """Hyper-parameters of Federated Dropout."""

    own_model: Literal["slice", "full"] = Field(
        default="full",
        description="what own/... evaluates before training: the full model, or the round's slice",
    )
    same_for_all: bool = Field(default=False, description="one draw a round, which all clients of a ratio share")


class FedDropout(SubModels):
    """Random slices, elementwise means."""

    hyper: FedDropoutHyper
    paper = "Caldas et al., arXiv 1812.07210"
    capabilities = Capabilities(on_device=True, takes_stale=True, own_retention=("dynamic_ratios",))
    draws_units = True

    def units_seed(self, ctx: Context) -> int:
        if self.hyper.same_for_all:
            return torch_seed(ctx.seed, ctx.round, NOBODY, "units")
        return super().units_seed(ctx)

    def units(self, ratio: float, ctx: Context) -> list[np.ndarray]:
        draws = np.random.default_rng(self.units_seed(ctx))
        return [np.sort(draws.permutation(group.width)[: group.kept(ratio)]) for group in self.sub_models.widths.groups]
