"""SGP: Assran, Loizou, Ballas, Rabbat, Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, Algorithm 1.
Averaging is push-sum: Kempe, Dobra, Gehrke, FOCS 2003.

Peer i keeps x_i and a mass w_i, at first 1, and its model is z_i = x_i / w_i. A round: delta_i is what local training
from z_i moved by, x_i <- x_i - delta_i; then every peer sends the share P_ji of (x_i, w_i) to each j that hears it, and
keeps P_ii; x_i and w_i become the sums of the shares that came.

- The columns of P sum to 1, so no mass is lost: sum_i w_i = n, and sum_i x_i moves by local training alone. So without
  training all z_i approach the mean of all models on any directed graph that connects all peers over some rounds,
  where averages with uniform weights agree on another point. Take `weights = "column"`, by which a sender divides its
  mass equally among itself and those who hear it. If rows sum to 1 too, w_i stays 1, and SGP is D-PSGD.
- The paper takes one step per round; here `epochs` or `steps` set the number.
- A peer holds u_i = x_i - w_i x^0 instead of x_i: the same recursion from 0, whose sums float32 holds better.
- A message is one tree for all, which the receivers multiply by their shares, and w_i in 8 bytes.
- An absent peer keeps its mass, and senders divide theirs among the peers that are present.
- With a constant learning rate and unlike data a distance from the minimiser remains that shrinks with the rate.
- An uplink with loss would lose mass, so no compressor may be set.
"""

import torch

from rayfl.methods.base import (
    Capabilities,
    Context,
    Finished,
    FirstDraws,
    ModelState,
    PeerHalf,
    Received,
    Traits,
    Tree,
    WeightedSum,
    exact_packet,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class SGPState(ModelState):
    """A peer's state; "params" is z_i."""

    shares: Tree  # u_i = x_i - w_i x^0
    mass: torch.Tensor  # w_i, float64 []


class SGP(GradientMethod, PeerHalf):
    """A peer trains from z_i, and divides x_i and w_i among its listeners and itself."""

    hyper: LocalWork
    Hyper = LocalWork
    paper = "Assran et al., ICML 2019"
    capabilities = Capabilities(
        on_device=True, keeps_parts=True, personalized=True, own_compression=True, needs_weights="column"
    )
    gather = {"shares": WeightedSum(), "mass": WeightedSum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> SGPState:
        return {"params": params, "shares": tree.zeros_like(params), "mass": torch.ones((), dtype=torch.float64)}

    def finish(self, state: SGPState, carry: LocalCarry, ctx: Context) -> Finished:
        shares = tree.sub(state["shares"], self.progress(carry))
        message = {"shares": shares, "mass": exact_packet("mass", float(state["mass"]))}
        return Finished(self.holding(shares, state["mass"], ctx), message, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: SGPState, received: Received, ctx: Context) -> SGPState:
        if not received:
            return state
        return self.holding(received["shares"].result, received["mass"].result["mass"], ctx)

    def holding(self, shares: Tree, mass: torch.Tensor, ctx: Context) -> SGPState:
        """The state of a peer with this u_i and w_i."""
        return {"params": tree.add(ctx.initial, shares, 1.0 / float(mass)), "shares": shares, "mass": mass}
