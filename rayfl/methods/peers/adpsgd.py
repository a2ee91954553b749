"""AD-PSGD: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018,
Algorithm 1.

Peer i takes x^ = x_i, and computes its change d_i from there: one step in the paper, `epochs` or `steps` of local
training here. When it is done it chooses a neighbour j at random. Both average their models, x_i = x_j = (x_i + x_j) /
2, then x_i <- x_i - d_i, and peer i begins again at once. Others may have changed x_i in the meantime, so d_i belongs
to an older model. `flight/staleness` is the number of these changes.

- It runs under `schedule = {name = "gossip", partners = 1}` alone. Averages keep the sum of all models.
- The exchange begins when the training is done, and takes the slower of the two transfers, with bandwidths and latency;
  j goes on training meanwhile. Averaging and step happen at its end, at once, with the models of that moment.
- Who is not available is not chosen. A peer without an available neighbour takes its step alone.
- The paper assumes a bipartite graph, so that peers cannot wait for each other; here nobody waits.
- Models are sent as they are, 4 bytes for each number in each direction; no uplink compressor is allowed, because an
  average of models needs both of them.
"""

from typing import NotRequired

from rayfl.methods.base import Capabilities, Context, Finished, ModelState, PeerHalf, Received, Tree, WeightedMean, tree
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel


class ADPSGDHyper(LocalWork):
    """Hyper-parameters of AD-PSGD."""

    default_steps = 1


class ADPSGDState(ModelState):
    """A peer's state."""

    change: NotRequired[Tree]  # between training and averaging, d_i


class ADPSGD(OwnModel, GradientMethod, PeerHalf):
    """A peer averages its model with that of one neighbour, and takes the step that it has computed meanwhile."""

    hyper: ADPSGDHyper
    paper = "Lian et al., ICML 2018"
    capabilities = Capabilities(on_device=True, own_compression=True, takes_stale=True, in_pairs=True)
    gather = {"model": WeightedMean()}

    def finish(self, state: ADPSGDState, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished({**state, "change": self.progress(carry)}, {}, 1.0, self.train_loss(carry, ctx))

    def message_to_partner(self, state: ADPSGDState, ctx: Context) -> dict[str, Tree]:
        return {"model": state["params"]}

    def mix(self, state: ADPSGDState, received: Received, ctx: Context) -> ADPSGDState:
        average = received["model"].result
        return {"params": tree.sub(average, state["change"]) if "change" in state else average}
