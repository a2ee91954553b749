"""DeepSqueeze: Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu, DeepSqueeze: Decentralization Meets Error-Compensated
Compression, arXiv 1907.07346, 2019, Algorithm 1.

Peer i keeps its model x_i and an error e_i, at first 0. A round: y_i is x_i after local training; c_i = C(y_i + e_i)
goes to every neighbour; e_i <- y_i + e_i - c_i; x_i = y_i + gamma (sum_j w_ij c_j - c_i).

- Models are compressed instead of differences, so the errors do not vanish, and a coarse C needs a tiny gamma. By
  default gamma is 0.1 times the uplink's delta (delta as in `choco`): about 0.1 with 8 or more bits per entry. With an
  uplink whose delta is below 0.5 take `choco`.
- W is symmetric, so sum_i x_i changes by local training alone, for any C and gamma. With C the identity and gamma = 1
  this is D-PSGD's average_first.
- The paper takes one step per round; here `epochs` or `steps` set the number.
- Receivers keep no copies, so the graph may change. A peer that misses the exchange keeps training and keeps e_i; the
  others take the mixing weights of the remaining graph. These must be Metropolis weights, which keep the mean. Weights
  that are not symmetric are refused; so are error feedback, and unbiased uplinks whose ratio differs between clients.
"""

from rayfl.methods.base import (
    Capabilities,
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
    tree,
)
from rayfl.methods.shared.gossip import Gossip, GossipStep
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class DeepSqueezeHyper(LocalWork, GossipStep):
    """Hyper-parameters of DeepSqueeze; its mixing weights are the topology's."""


class DeepSqueezeState(ModelState, UplinkMemory):
    """A peer's state."""

    error: Tree  # e_i


class DeepSqueeze(GradientMethod, Gossip):
    """A peer sends the compressed sum of its model and of its last compression error."""

    hyper: DeepSqueezeHyper
    paper = "Tang et al., arXiv 1907.07346"
    capabilities = Capabilities(on_device=True, keeps_parts=True, needs_everyone=False)
    share = 0.1

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DeepSqueezeState:
        return {"params": params, "error": tree.zeros_like(params)}

    def finish(self, state: DeepSqueezeState, carry: LocalCarry, ctx: Context) -> Finished:
        params, error = carry["params"], state["error"]
        packets, state = compressed(state, {"model": tree.add(params, error)}, ctx)
        if packets:
            sent = tree.scale(packets["model"].decode_beside(params), contracting(ctx.uplink, params))
            # This is the peer's own part of the exchange; `mix` adds the neighbours' part.
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
