"""LAG: Chen, Giannakis, Sun, Yin, LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed Learning,
NeurIPS 2018, with the rule at the workers (LAG-WK). `lag_ps` has the rule at the server.

A client uploads the change of its gradient since its last upload, but only if it is large compared with x's steps:
||change||^2 > (1 / lr^2) sum_{d=1..D} xi ||x^{k+1-d} - x^{k-d}||^2. The server adds the changes to its sum of the last
gradients of all clients and steps along their mean, in silent rounds too.

- The objective is the mean over clients, so that the paper's 1 / (alpha^2 M^2) becomes 1 / alpha^2.
- A silent client sends nothing and is billed nothing; gradients count as 0 before the first upload.
- The theory is for gradients of the whole split (batch_size = 0); with minibatches noise triggers uploads.
- A client that was absent knows how far x moved meanwhile, not the single steps: it counts m missed steps as m equal
  ones, whose sum of squares is at most that of the true ones. So it may send too often, but never too rarely.
- With a compressor on the uplink both ends remember the gradient as decoded.
"""

from typing import Literal

import torch

from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Field,
    Finished,
    FirstDraws,
    Metrics,
    ModelState,
    Received,
    Sum,
    Traits,
    Tree,
    UplinkMemory,
    compressed,
    tree,
    unused_with,
)
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientCarry, GradientStep

NEVER_LAZY = unused_with(threshold=[0])


class LAGHyper(GradientStep):
    """Hyper-parameters of LAG; the paper's experiments have lr = 1 / L."""

    threshold: float = Field(
        default=0.1, ge=0, description="weight of each of the last squared steps, xi; 0: no laziness"
    )
    num_steps: int = Field(
        default=10, ge=1, description="how many steps the rule remembers, D", json_schema_extra=NEVER_LAZY
    )
    weighting: Literal["uniform"] = Field(default="uniform", description="the objective is the plain mean over clients")


class Known(UplinkMemory):
    """The part of a client's state that the server knows."""

    sent: Tree  # the gradient that the server has of it


class LAGState(Known):
    """Client state."""

    model: Tree  # x when it was last here
    round: torch.Tensor  # the round of that x
    steps: torch.Tensor  # the last squared steps of x [num_steps]


class LAGServer(ModelState):
    """Server state, beside x."""

    gradients: Tree  # the sum of the last gradients of all clients


class LAG(DistributedGradient):
    """Clients send changes of their gradients, if they are large."""

    hyper: LAGHyper
    paper = "Chen et al., LAG, NeurIPS 2018 (LAG-WK)"
    capabilities = Capabilities(on_device=True, may_be_silent=True)
    gather = {"change": Sum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> LAGState:
        steps = torch.zeros(self.hyper.num_steps)
        return {"sent": tree.zeros_like(params), "model": params, "round": torch.tensor(0), "steps": steps}

    def finish(self, state: LAGState, carry: GradientCarry, ctx: Context) -> Finished:
        num_missed = ctx.round - int(state["round"])
        steps = state["steps"]
        if num_missed:
            way = tree.norm(tree.sub(carry["params"], state["model"]))
            steps = torch.cat([steps.new_full((num_missed,), (way / num_missed) ** 2), steps])[: len(steps)]
        state = {**state, "model": carry["params"], "round": torch.tensor(ctx.round), "steps": steps}
        change = tree.sub(carry["gradient"], state["sent"])
        if tree.norm(change) ** 2 <= self.tolerated(steps, ctx):
            return self.finished(state, {}, carry, ctx)
        return self.upload(state, change, carry, ctx)

    def tolerated(self, steps: torch.Tensor, ctx: Context) -> float:
        """(1 / lr^2) sum_d xi s_d of the last squared steps s [D]: the largest change that needs no upload."""
        return self.hyper.threshold * float(steps.sum()) / self.hyper.rate(ctx.round) ** 2

    def upload(self, state: Known, change: Tree, carry: GradientCarry, ctx: Context) -> Finished:
        """End a round that sends `change`; the state keeps the gradient that the server then has."""
        message, state = compressed(state, {"change": change}, ctx)
        if message:
            state = {**state, "sent": tree.add(state["sent"], message["change"].decode_beside(change))}
        return self.finished(state, message, carry, ctx)

    def init_server(self, params: Tree) -> LAGServer:
        return {"params": params, "gradients": tree.zeros_like(params)}

    def server_update(
        self, server: LAGServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[LAGServer, Metrics]:
        gradients, change = server["gradients"], received["change"]
        if change.count:
            gradients = tree.add(gradients, change.sum)
        params = tree.add(server["params"], gradients, -self.hyper.rate(ctx.round) / ctx.num_clients)
        return {**server, "params": params, "gradients": gradients}, {}
