"""ind-weipru: every peer alone trains real weights and prunes them by magnitude; Tian et al., MCE-PL, section V-C.

One minibatch a round. As in the authors' code the dense weights are kept: the model is w o m with the largest |w| of
each layer, its gradient moves all of w (straight through the mask), and what was pruned can come back with its value.
`hard=true` is the paper's sentence instead, "after each iteration prunes": what is pruned is 0. Both prune the start.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rayfl.gather import Aggregate, Gather
from rayfl.methods.base import Carry, Context, Finished, PeerHalf
from rayfl.methods.shared.pruned_weights import PrunedWeights, PrunedWeightsHyper
from rayfl.tree import State


class IndWeipruHyper(PrunedWeightsHyper):
    """Hyper-parameters of ind-weipru."""

    hard: bool = Field(default=False, description="whether pruned weights are lost, instead of only left out")


class IndWeipru(PrunedWeights, PeerHalf):
    """No communication. State: weights, dense unless `hard`, and mask."""

    Hyper: ClassVar[type[IndWeipruHyper]] = IndWeipruHyper
    hyper: IndWeipruHyper
    paper: ClassVar[str] = "Tian et al., MCE-PL, real weights without communication"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        if self.hyper.hard:
            new = self.pruned(self.descended(self.final_model(state), carry, ctx), ctx.traits)
        else:
            weights = self.descended(state["weights"], carry, ctx)
            new = {"weights": weights, "mask": self.mask_of(weights, ctx.traits)}
        return Finished(new, None, 1.0, self.trained(state, carry, ctx))

    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        return state
