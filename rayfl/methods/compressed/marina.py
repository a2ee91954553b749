"""MARINA: Gorbunov, Burlachenko, Li, Richtarik, MARINA: Faster Non-Convex Distributed Learning with Compression, ICML
2021, Algorithm 1; also in WEN Hao's slides.

x <- x - gamma g. By a coin that all share, every client sends its gradient at the new x uncompressed (probability p),
or Q(grad f_i(new x) - grad f_i(old x)), and g <- mean_i of the gradients, or g <- g + mean_i of the differences. The
first round, g = grad f(x^0), is uncompressed. Q is unbiased; g is not.

- p is 1 / (1 + omega) of the uplink unless given (k / d for rand-k); an uplink without omega demands it. gamma at most
  1 / (L (1 + sqrt((1 - p) omega / (p n)))) with L^2 = mean_i L_i^2; under strong convexity with
  2 (1 - p) omega / (p n) under the root, and at most p / (2 mu).
- A client remembers the x that it last received, so it downloads only 4P bytes per round. It computes one gradient, or
  two at two points on the same examples: the whole train split (batch_size = 0), or one minibatch. With minibatches the
  uncompressed gradients, too, are those of a minibatch.
- The theory needs all clients in every round. If clients are absent, means are over those who delivered, and a client
  that missed the last round, whose old x is not the server's, sends nothing in a round of differences. After a round in
  which nothing arrived, x has not changed and the next round is uncompressed, whatever the coin says.
"""

from typing import NotRequired

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Delivered,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    Metrics,
    ModelState,
    Received,
    Stage,
    Traits,
    Tree,
    UplinkMemory,
    WeightedMean,
    tree,
    uncompressed,
)
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientCarry, GradientStep, stated_omega


class MARINAHyper(GradientStep):
    """Hyper-parameters of MARINA."""

    dense_probability: float | None = Field(
        default=None, gt=0, le=1, description="chance of an uncompressed round, p; default: 1 / (1 + omega)"
    )


class MARINAState(UplinkMemory):
    """Client state."""

    point: Tree  # the x that it last received
    round: torch.Tensor  # the round in which it did


class MARINACarry(GradientCarry):
    """A client's carry."""

    dense: torch.Tensor  # whether the gradient is sent uncompressed
    previous: NotRequired[Tree]  # in a round of differences, the old x


class MARINAServer(ModelState):
    """Server state, beside x."""

    gradient: Tree  # g
    restart: torch.Tensor  # whether g must be computed from uncompressed gradients


class MARINA(DistributedGradient):
    """The model is sent under the name "restart" if g must be computed from uncompressed gradients, else as "model"."""

    hyper: MARINAHyper
    paper = "Gorbunov et al., ICML 2021"
    capabilities = Capabilities(on_device=True, may_be_silent=True, needs_one_omega=True)
    gather = {"gradient": WeightedMean()}

    def is_dense(self, ctx: Context) -> bool:
        """The coin of this round: whether gradients are sent uncompressed. Raises ValueError if p must be given."""
        p = self.hyper.dense_probability
        return ctx.plan.coin < (1 / (1 + stated_omega(ctx, "dense_probability")) if p is None else p)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> MARINAState:
        return {"point": params, "round": torch.tensor(-1)}

    def begin(self, state: MARINAState, received: Message, ctx: Context) -> MARINACarry:
        if "restart" in received:
            return {**self.start(received["restart"].decode()), "dense": torch.tensor(True)}
        dense = self.is_dense(ctx)
        carry: MARINACarry = {**self.start(received["model"].decode()), "dense": torch.tensor(dense)}
        follows = not dense and int(state["round"]) == ctx.round - 1
        return {**carry, "previous": state["point"]} if follows else carry

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # A round of differences takes one at the old point too. A client that missed it takes none there.
        return 1.0 if ctx.round == 0 or self.is_dense(ctx) else 2.0

    def step(self, carry: MARINACarry, batch: Batch, *, stage: Stage) -> MARINACarry:
        carry = super().step(carry, batch, stage=stage)
        if "previous" not in carry:
            return carry
        _, previous = self.value_and_grad(carry["previous"], batch)
        return {**carry, "gradient": tree.sub(carry["gradient"], previous)}

    def finish(self, state: MARINAState, carry: MARINACarry, ctx: Context) -> Finished:
        state = {**state, "point": carry["params"], "round": torch.tensor(ctx.round)}
        if carry["dense"]:
            return self.finished(state, uncompressed({"gradient": carry["gradient"]}, ctx), carry, ctx)
        # A client whose old x is not the server's has no difference to send.
        return self.finished(state, {"gradient": carry["gradient"]} if "previous" in carry else {}, carry, ctx)

    def init_server(self, params: Tree) -> MARINAServer:
        return {"params": params, "gradient": tree.zeros_like(params), "restart": torch.tensor(True)}

    def download(self, server: MARINAServer, ctx: Context) -> Download:
        # If p must be given and is not, this raises before any client works.
        self.is_dense(ctx)
        return {"restart" if server["restart"] else "model": server["params"]}

    def server_update(
        self, server: MARINAServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[MARINAServer, Metrics]:
        dense = bool(server["restart"]) or self.is_dense(ctx)
        gradient = received["gradient"].result
        if not gradient:
            return {**server, "restart": torch.tensor(True)}, {}
        if not dense:
            gradient = tree.add(server["gradient"], gradient)
        params = tree.add(server["params"], gradient, -self.hyper.rate(ctx.round))
        return {"params": params, "gradient": gradient, "restart": torch.tensor(False)}, {"marina/dense": float(dense)}
