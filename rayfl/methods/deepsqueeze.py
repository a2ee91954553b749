"""DeepSqueeze: Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu, DeepSqueeze: Decentralization Meets Error-Compensated
Compression, arXiv 1907.07346, 2019, Algorithm 1.

Peer i has a model x_i and an error e_i, at first 0. A round: y_i = x_i after local training; c_i = C(y_i + e_i) goes to
every neighbour; e_i <- y_i + e_i - c_i; x_i = y_i + gamma (sum_j w_ij c_j - c_i).

- Models are compressed, and not differences, so errors do not vanish and a coarse C needs a tiny gamma. It is 0.1 times
  the uplink's delta unless given (delta as in `choco`): about 0.1 with 8 or more bits an entry. With an uplink whose
  delta is below 0.5 take `choco`.
- sum_i x_i changes by local training alone, for any C and gamma: W is symmetric. With C the identity and gamma = 1 this
  is D-PSGD's average_first.
- The paper takes one step a round; here `epochs` or `steps` say how many.
- Receivers remember nothing, so graphs may change. A peer that is away from the exchange trains on and keeps e_i, and
  the others' weights are those of the graph that is left; they must be Metropolis' then, which keep the mean. Weights
  that are not symmetric, error feedback and unbiased uplinks by client are refused.
"""

from rayfl import tree
from rayfl.methods.base import (
    Context,
    Finished,
    FirstDraws,
    ModelState,
    Received,
    Traits,
    Tree,
    UplinkMemory,
    compressed,
    contracting,
)
from rayfl.methods.shared.gossip import Gossip, GossipStep
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class DeepSqueezeHyper(LocalWork, GossipStep):
    """Hyper-parameters of DeepSqueeze; its mixing weights are the topology's."""


class DeepSqueezeState(ModelState, UplinkMemory):
    """A peer's state."""

    error: Tree  # e_i


class DeepSqueeze(GradientMethod, Gossip, on_device=True, keeps_parts=True):
    """A peer sends its compressed model, with the error of the last time."""

    hyper: DeepSqueezeHyper
    paper = "Tang et al., arXiv 1907.07346"
    needs_everyone = False
    share = 0.1

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DeepSqueezeState:
        return {"params": params, "error": tree.zeros_like(params)}

    def finish(self, state: DeepSqueezeState, carry: LocalCarry, ctx: Context) -> Finished:
        params, error = carry["params"], state["error"]
        packets, state = compressed(state, {"model": tree.add(params, error)}, ctx)
        if packets:
            sent = tree.scale(packets["model"].decode_beside(params), contracting(ctx.uplink, params))
            # The own part of the exchange; `mix` adds the neighbours'.
            params, error = tree.add(params, sent, -self.gamma(ctx)), tree.sub(tree.add(params, error), sent)
        return Finished({**state, "params": params, "error": error}, packets, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: DeepSqueezeState, received: Received, ctx: Context) -> DeepSqueezeState:
        if not received:
            return state
        return {
            **state,
            "params": tree.add(
                state["params"], received["model"].result, self.gamma(ctx) * contracting(ctx.uplink, ctx.initial)
            ),
        }
