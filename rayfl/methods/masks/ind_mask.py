"""ind-mask: MCE-PL's peers alone, each with a mask of its own on the common random weights; Tian et al., MCE-PL,
section II-B.

One minibatch per round: z <- z - eta ((df/dv) o w o sign(z) + lambda z / ||z_row||), m = Fil[Thres(z)]. The section has
neither the lasso nor Fil; the authors' code has Fil. Both are on as in MCE-PL: `lasso=0 fil=0` switches them off.
"""

from rayfl.methods.base import Capabilities, Context, Finished, FirstDraws, Traits, Tree
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.learned_masks import HiddenMasks, ScoredModel


class IndMask(HiddenMasks):
    """No communication."""

    paper = "Tian et al., MCE-PL, without communication"
    capabilities = Capabilities(on_device=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ScoredModel:
        z = self.scores_for(params, draws)
        return {"scores": z, **self.masked_by(z, client, params)}

    def finish(self, state: ScoredModel, carry: GradientCarry, ctx: Context) -> Finished:
        _, z = self.descend(state, carry, ctx)
        new: ScoredModel = {"scores": z, **self.masked_by(z, ctx.traits, ctx.initial)}
        return Finished(new, None, 1.0, self.trained(carry))
