"""FedRolex: Alam, Liu, Yan, Zhang, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction,
NeurIPS 2022, Algorithm 1.

In round t a client holds the units t, t + 1, ..., t + k - 1 modulo n of a group of n units, in this order; so over n
rounds each unit is trained equally often. All clients of a ratio hold the same ones. The server averages each entry
over the clients that held it.

- The window moves forwards by `advance` units a round, as in the paper's text; the authors' code moves it backwards,
  which gives the same windows in the opposite order.
- In attention the window moves inside each head; the authors' code moves it over all heads' units, and then units leave
  their head.
- One weight for all entries. In the authors' code biases, norms and the last layer are weighted by their numbers of
  updates.
- Two groups of equal width move together. So if no client keeps more than half of them, some entries between two layers
  are never in any window: rayfl names their tensors before the run. With `phases = "per_group"`, ours, each group
  begins at an offset of its own, drawn anew each time that its window has gone around.
- The model that clients use is the full one (`own_model`).
"""

import logging
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayfl.determinism.seeding import generator
from rayfl.errors import log_once
from rayfl.methods.base import Capabilities, Context, Field
from rayfl.methods.shared.sub_models import DrawnRatios, SubModels


class FedRolexHyper(DrawnRatios):
    """Hyper-parameters of FedRolex."""

    own_model: Literal["slice", "full"] = Field(
        default="full",
        description="what own/... evaluates before training: the full model, or the round's slice",
    )
    advance: int = Field(default=1, ge=1, description="units by which the window moves each round")
    phases: Literal["together", "per_group"] = Field(
        default="together",
        description="where the windows of groups begin: together at unit 0, or each at an offset of its own",
    )


class FedRolex(SubModels):
    """Rolling slices, elementwise means."""

    hyper: FedRolexHyper
    paper = "Alam et al., NeurIPS 2022"
    capabilities = Capabilities(on_device=True, takes_stale=True, own_retention=("dynamic_ratios",))

    def units(self, ratio: float, ctx: Context) -> list[np.ndarray]:
        return self.window(ratio, ctx.round, ctx.seed)

    def window(self, ratio: float, round_number: int, seed: int) -> list[np.ndarray]:
        """The units of each group in a round, in the window's order."""
        windows = []
        for number, group in enumerate(self.sub_models.widths.groups):
            moved = self.hyper.advance * round_number
            if self.hyper.phases == "per_group":
                draws = generator(seed, moved // group.width, purpose=f"phase of group {number}")
                moved += int(draws.integers(group.width))
            windows.append((moved + np.arange(group.kept(ratio))) % group.width)
        return windows

    def never_trained(self, ratio: float, num_rounds: int, seed: int) -> dict[str, int]:
        """By tensor, the number of entries that a client of this ratio holds in none of the rounds, if there are any.

        Windows of smaller ratios lie inside those of larger ones.
        """
        widths = self.sub_models.widths
        held = [np.zeros((num_rounds, group.width), np.float32) for group in widths.groups]
        for round_number in range(num_rounds):
            for number, units in enumerate(self.window(ratio, round_number, seed)):
                held[number][round_number, units] = 1
        never: dict[str, int] = {}
        for name, axes in widths.weights.items():
            cut = [axis.among(held) for axis in axes if axis is not None]
            if not 1 <= len(cut) <= 2:
                continue
            together = cut[0].T @ cut[1] if len(cut) == 2 else np.sum(cut, axis=(0, 1))
            count = int((together == 0).sum()) * math.prod(
                size for size, axis in zip(widths.shapes[name], axes, strict=True) if axis is None
            )
            if count:
                never[name] = count
        return never

    def check_ratios(self, ratios: Sequence[float], ctx: Context) -> None:
        super().check_ratios(ratios, ctx)
        if never := self.never_trained(max([*ratios, *self.hyper.dynamic_ratios]), ctx.num_rounds, ctx.seed):
            share = sum(never.values()) / sum(tensor.numel() for tensor in ctx.initial.values())
            names = ", ".join(f"{name} ({count})" for name, count in never.items())
            log_once(
                logging.WARNING,
                f"{share:.1%} of the model's entries are in no client's window in any of the {ctx.num_rounds} rounds "
                f"and keep their initial values: {names}; raise the largest clients.retention_ratio above 0.5, train "
                "for more rounds, or set method.phases='per_group'",
            )
