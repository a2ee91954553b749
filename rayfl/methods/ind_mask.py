"""ind-mask: MCE-PL's peers alone, each with a mask of its own on the common random weights; Tian et al., MCE-PL,
section II-B.

One minibatch a round: z <- z - eta ((df/dv) o w o sign(z) + lambda z / ||z_row||), m = Fil[Thres(z)]. The section has
neither the lasso nor Fil; the authors' code has Fil. Both are on as in MCE-PL: `lasso=0 fil=0` switches them off.
"""

from collections.abc import Mapping
from typing import ClassVar

from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather
from rayfl.methods.base import Carry, Context, Finished, PeerHalf
from rayfl.methods.shared.learned_masks import HiddenMasks
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class IndMask(HiddenMasks, PeerHalf):
    """No communication. State: scores, mask, model."""

    paper: ClassVar[str] = "Tian et al., MCE-PL, without communication"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        z = self.scores_for(params, draws)
        return {"scores": z, **self.masked_by(z, client, params)}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        _, z = self.descend(state, carry, ctx)
        new = {"scores": z, **self.masked_by(z, ctx.traits, ctx.initial)}
        return Finished(new, None, 1.0, self.trained(state, carry, ctx))

    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        return state
