"""FetchSGD: Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020,
Algorithm 1.

A client sends the count sketch of its gradient, S_i = Sketch(g_i), an R x C table made with hash functions that all
clients share; it keeps no state. Sketches are linear, so the server keeps momentum and error as tables:
U <- rho U + mean_i S_i, E <- E + eta U, Delta = TopK(Estimate(E)), remove Delta from E, x <- x - Delta.

- To remove Delta, the paper subtracts Sketch(Delta) from E (`error="subtract"`). The authors' code instead sets the
  cells of E that Sketch(Delta) touches to 0 (`zero`, the default), because subtracting diverged, and also those cells
  of U (`mask_momentum`), which the paper does not. That code applies the learning rate after the top k; here, as in the
  paper, eta is a part of E, so that the error keeps its size if eta changes.
- Defaults: R = 5, C = a fiftieth of the P entries, k = a hundredth of them.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch.
- Up: 32 R C bits. Down: the Delta of the round before, as k values and their positions; nothing in round 0, as x^0
  comes from the seed. A client that missed rounds gets every Delta that it missed, or x (4 bytes per entry), whichever
  is smaller, and is billed for it.
- Clients may be absent: the mean is over those who delivered, uniform by default. After a round in which nothing
  arrived Delta is 0, and momentum and error stay as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from rayfl.compress.countsketch import Sketching, largest
from rayfl.compress.sparse import TopK
from rayfl.determinism.seeding import torch_seed
from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Field,
    Finished,
    Metrics,
    ModelState,
    Packet,
    Received,
    State,
    Tree,
    WeightedMean,
    tree,
    uncompressed,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, GradientStep, SteppingServer


class FetchSGDHyper(GradientStep, Sketching):
    """Hyper-parameters of FetchSGD."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of the server, rho")
    error: Literal["zero", "subtract"] = Field(
        default="zero", description="cells of E that Delta touches: set to 0, or Sketch(Delta) is subtracted"
    )
    mask_momentum: bool = Field(default=True, description="set the cells of U that Delta touches to 0")


class FetchSGDServer(ModelState):
    """Server state; "params" are x before the last Delta, momentum and error are tables, float32 [R, C]."""

    momentum: Tensor  # U
    error: Tensor  # E
    step: Tree  # the last Delta, which the server sends next


class FetchSGD(SteppingServer):
    """Up: the sketch of the gradient. Server: x, and the sketches of momentum and error. The hash functions are drawn
    from the experiment's seed and stay the same for the whole run."""

    hyper: FetchSGDHyper
    paper = "Rothchild et al., ICML 2020"
    capabilities = Capabilities(on_device=True, own_compression=True)
    gather = {"sketch": WeightedMean()}

    def finish(self, state: State, carry: GradientCarry, ctx: Context) -> Finished:
        table = self.hyper.table(carry["gradient"], torch_seed(ctx.seed, purpose="sketch"))
        return self.finished(state, uncompressed({"sketch": {"table": table}}, ctx), carry, ctx)

    def init_server(self, params: Tree) -> FetchSGDServer:
        nothing = self.hyper.table(tree.zeros_like(params), 0)
        return {"params": params, "momentum": nothing, "error": nothing, "step": tree.zeros_like(params)}

    def model(self, server: FetchSGDServer) -> Tree:
        return tree.sub(server["params"], server["step"])

    def steps(self, server: FetchSGDServer, ctx: Context) -> Sequence[Packet]:
        """Delta, as a packet that decodes to x."""
        top_k = TopK(keep_ratio=self.hyper.keep_ratio, scope="model")
        return self.encoded(server["step"], replace(ctx, downlink=top_k), (server["params"], -1.0))

    def server_update(
        self, server: FetchSGDServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FetchSGDServer, Metrics]:
        hyper, x, seed = self.hyper, self.model(server), torch_seed(ctx.seed, purpose="sketch")
        if not received["sketch"].count:
            return {**server, "params": x, "step": tree.zeros_like(x)}, {}
        momentum = hyper.momentum * server["momentum"] + received["sketch"].result["table"]
        error = server["error"] + hyper.rate(ctx.round) * momentum
        delta = tree.unvector(largest(error.numpy(), tree.num_entries(x), hyper.keep_ratio, seed), x)
        sent = hyper.table(delta, seed)
        return {
            "params": x,
            "momentum": momentum * (sent == 0) if hyper.mask_momentum else momentum,
            "error": error - sent if hyper.error == "subtract" else error * (sent == 0),
            "step": delta,
        }, {}
