"""BEER: Zhao, Li, Li, Richtarik, Chi, BEER: Fast O(1/T) Rate for Decentralized Nonconvex Optimization with
Communication Compression, NeurIPS 2022, Algorithm 1.

Peer i keeps its model x_i, a tracker v_i of the mean gradient, the public copies h_i of x_i and g_i of v_i, which its
neighbours know too, and s_i = sum_j w_ij h_j and z_i = sum_j w_ij g_j. A round, with u_i the gradient of one batch at
x_i: v_i += gamma (z_i - g_i) + u_i - (the u_i of the round before) and r_i = C(v_i - g_i); then
x_i += gamma (s_i - h_i) - eta v_i and q_i = C(x_i - h_i). Both go to every neighbour: g_i += r_i,
z_i += sum_j w_ij r_j, h_i += q_i, s_i += sum_j w_ij q_j.

- The sequence of steps is the paper's, but the paper's round moves x first and then v, and ours v first. So a round
  takes one gradient; in round 0 v_i = u_i, and no r_i is sent.
- The state holds d_i = v_i - u_i, which changes by gamma (z_i - g_i) alone. Its mean over the peers stays 0, so
  mean_i v_i = mean_i u_i for any C, gamma and eta. The authors' torch code takes u_i and the u_i of the round before on
  one batch.
- The point with all x_i = x*, v_i = 0 and g_i = 0 is a fixed point, although the gradients of single peers are not 0
  there. So with gradients of the whole train split (batch_size = 0) BEER converges to x* with a constant eta and unlike
  data.
- A link carries two messages per round and direction, and one in round 0.
- By default gamma is half of the uplink's delta (delta as in `choco`). The theory has gamma = c delta rho and
  eta = c' gamma rho^2 / L, with rho the spectral gap of W.
- h_i begins at the common model (with `hats="zero"` at the paper's 0), g_i at 0. Everything that CHOCO refuses is
  refused here too.
"""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    State,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, OneBatch, OneGradient
from rayfl.methods.shared.gossip import CopiedStep, Gossip, PublicCopies
from rayfl.methods.shared.local_training import LearningRate


class BEERHyper(OneBatch, LearningRate, CopiedStep):
    """Hyper-parameters of BEER; its mixing weights are the topology's."""

    lr: float = Field(default=0.01, gt=0, description="step size, eta")


class BEERState(PublicCopies):
    """A peer's state."""

    drift: Tree  # d_i = v_i - u_i


class BEER(OneGradient, Gossip):
    """A peer sends two compressed differences: of its model, and of its tracker, to their public copies."""

    hyper: BEERHyper
    paper = "Zhao et al., NeurIPS 2022"
    capabilities = Capabilities(on_device=True, evaluated_after_training=False)
    share = 0.5
    gather = {"model": WeightedMean(), "tracker": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {**super().init_client(client, params, draws), "drift": tree.zeros_like(params)}

    def finish(self, state: BEERState, carry: GradientCarry, ctx: Context) -> Finished:
        drift = self.pulled("tracker", state["drift"], state, ctx)
        tracker = tree.add(drift, carry["gradient"])
        x = tree.add(self.pulled("model", state["params"], state, ctx), tracker, -self.hyper.rate(ctx.round))
        return self.told(
            {**state, "params": x, "drift": drift},
            {"model": x} | ({"tracker": tracker} if ctx.round else {}),
            {"train/loss": float(carry["loss"])},
            ctx,
        )
