"""RelaySGD: Vogels, He, Koloskova, Karimireddy, Lin, Stich, Jaggi, RelaySum for Decentralized Deep Learning on
Heterogeneous Data, NeurIPS 2021, Algorithm 1.

On a tree, peer i sends each neighbour j a message of its own: m_ij = y_i + the sum of the messages that i had in the
round before from its other neighbours, and c_ij, how many models are in it. y_i is x_i after local training. Then
x_i = (y_i + sum_j m_ji) / (1 + sum_j c_ji), with the messages of this round.

- So after as many rounds as the tree is wide x_i is the exact mean of all models, those of far peers being older: by as
  many rounds as they are hops away, less one. A constant learning rate then leads to the minimiser of unlike data up to
  that delay. Before, x_i is the mean of the peers that are near enough: c_ij begins at 0.
- `fill`: what stands for models that have not come yet. counts: nothing, as above (Algorithm 1); own: y_i; initial: the
  common first model.
- The graph must be a tree that does not change; in a cycle peers would be counted again and again. The topology
  "spanning-tree" makes one of any graph. No mixing weights are used.
- A message holds sums of y - x^0, and all know x^0, so that float32 holds long sums.
- If a neighbour is absent, `missing="last"` keeps its last message, which is a round older; "drop" leaves it and what
  is behind it out of the mean for this round, and so out of the messages of the next. To a peer that trains and is
  absent from the exchange, all neighbours are absent.
- The sum of the models is not kept. Compressors with loss are refused: their errors would be relayed.
- The paper takes one step per round; here `epochs` or `steps` set the number.
"""

from typing import Literal

import torch

from rayfl.methods.base import (
    Capabilities,
    Collect,
    Context,
    Field,
    Finished,
    FirstDraws,
    ModelState,
    PeerHalf,
    Received,
    Traits,
    Tree,
    Upload,
    scalar_packet,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class RelaySGDHyper(LocalWork):
    """Hyper-parameters of RelaySGD."""

    fill: Literal["counts", "own", "initial"] = Field(
        default="counts",
        description="models that have not come yet: counts: are left out of the mean; own: are taken for the own one; "
        "initial: are taken for the first one",
    )
    missing: Literal["last", "drop"] = Field(
        default="last", description="messages of absent neighbours: last: the last one stands in; drop: none does"
    )


class RelaySGDState(ModelState):
    """A peer's state; the tables have an entry for each neighbour, named by its number."""

    sums: dict[str, Tree]  # m_ji, of y - x^0
    counts: dict[str, torch.Tensor]  # c_ji, float32 []


class RelaySGD(GradientMethod, PeerHalf):
    """A peer relays to each neighbour the sum of all models on its own side of the link."""

    hyper: RelaySGDHyper
    paper = "Vogels et al., NeurIPS 2021"
    capabilities = Capabilities(
        on_device=True, personalized=True, include_self=False, own_compression=True, needs_tree=True
    )
    gather = {"sum": Collect(), "count": Collect()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> RelaySGDState:
        return {"params": params, "sums": {}, "counts": {}}

    def finish(self, state: RelaySGDState, carry: LocalCarry, ctx: Context) -> Finished:
        new: RelaySGDState = {**state, "params": carry["params"]}
        return Finished(new, {}, 1.0, self.train_loss(carry, ctx))

    def message_to(self, state: RelaySGDState, neighbour: int, ctx: Context) -> Upload:
        total, count = self.summed(state, ctx, without=str(neighbour))
        return {"sum": total, "count": scalar_packet("count", count)}

    def mix(self, state: RelaySGDState, received: Received, ctx: Context) -> RelaySGDState:
        kept = self.hyper.missing == "last"
        # A peer that is absent, or whose neighbours are, has received nothing.
        came = {name: collected.items for name, collected in received.items()}
        sums = {str(peer): total for peer, total in came.get("sum", {}).items() if isinstance(total, dict)}
        counts = {str(peer): c["count"] for peer, c in came.get("count", {}).items() if isinstance(c, dict)}
        new: RelaySGDState = {
            "params": state["params"],
            "sums": {**state["sums"], **sums} if kept else sums,
            "counts": {**state["counts"], **counts} if kept else counts,
        }
        total, count = self.summed(new, ctx)
        absent = 0.0 if self.hyper.fill == "counts" else ctx.num_clients - count
        if self.hyper.fill == "own":
            total = tree.add(total, tree.sub(state["params"], ctx.initial), absent)
        return {**new, "params": tree.add(ctx.initial, total, 1.0 / (count + absent))}

    def summed(self, state: RelaySGDState, ctx: Context, without: str = "") -> tuple[Tree, float]:
        """y - x^0 plus the sums that came from all neighbours but one, and the number of models in the result."""
        total, count = tree.sub(state["params"], ctx.initial), 1.0
        for peer in sorted(state["sums"].keys() - {without}, key=int):
            total, count = tree.add(total, state["sums"][peer]), count + float(state["counts"][peer])
        return total, count
