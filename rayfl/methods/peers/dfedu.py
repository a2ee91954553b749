"""dFedU, FedU among peers: Dinh et al., FedU: A Unified Framework for Federated Multi-Task Learning with Laplacian
Regularization, 2021; also in WEN Hao's slides.

A round is R local steps, w_k to w_k^R, an exchange with the neighbours, and w_k <- w_k^R - mu_t eta sum_l a_kl (w_k^R -
w_l^R), with one coefficient lap_step = mu_t eta. The notes of `fedu` on graph and weights hold here too.

- A peer that is absent from the exchange continues with its own model, and none of its links counts: sum_k w_k is kept.
- A peer sends w_k^R - w^0, and all know w^0: entries that an uplink compressor drops count as unchanged. A peer's
  differences use the change that it sent itself, so that the sum is kept under compression too.
"""

from typing import NotRequired

from rayfl.methods.base import (
    Capabilities,
    Context,
    Finished,
    ModelState,
    PeerHalf,
    Received,
    Topology,
    Tree,
    UplinkMemory,
    WeightedMean,
    compressed,
    tree,
)
from rayfl.methods.shared.laplacian import LaplacianHyper, check_lap_step
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, OwnModel


class DFedUState(ModelState, UplinkMemory):
    """A peer's state."""

    sent: NotRequired[Tree]  # between training and exchange, the change that it sent


class DFedU(OwnModel, GradientMethod, PeerHalf):
    """A peer trains from its own model, and moves along the Laplacian at the exchange."""

    hyper: LaplacianHyper
    paper = "Dinh et al., FedU, 2021, among peers"
    capabilities = Capabilities(on_device=True, include_self=False, weighs_links=True)
    gather = {"change": WeightedMean()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        check_lap_step(self.hyper.lap_step, topology, num_clients, seed)

    def finish(self, state: DFedUState, carry: LocalCarry, ctx: Context) -> Finished:
        change = tree.sub(carry["params"], ctx.initial)
        packets, state = compressed(state, {"change": change}, ctx)
        state = {**state, "params": carry["params"]}
        if packets:
            state["sent"] = packets["change"].decode_beside(change)
        return Finished(state, packets, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: DFedUState, received: Received, ctx: Context) -> DFedUState:
        state = state.copy()
        sent = state.pop("sent", None)
        if not received or not received["change"].count or sent is None:
            return state
        heard = received["change"]
        # sum_l a_kl (w_k - w_l) = (sum_l a_kl) (w_k - the mean of the w_l).
        pull = tree.sub(sent, heard.result)
        return {**state, "params": tree.add(state["params"], pull, -self.hyper.lap_step * heard.weight)}
