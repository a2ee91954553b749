"""MARINA: Gorbunov, Burlachenko, Li, Richtarik, MARINA: Faster Non-Convex Distributed Learning with Compression, ICML
2021, Algorithm 1; also in WEN Hao's slides.

x <- x - gamma g. By a coin that all share, every client sends its gradient at the new x uncompressed (probability p),
or Q(grad f_i(new x) - grad f_i(old x)), and g <- mean_i of the gradients, or g <- g + mean_i of the differences. The
first round, g = grad f(x^0), is uncompressed. Q is unbiased; g is not.

- p is 1 / (1 + omega) of the uplink unless given (k / d for rand-k); an uplink without omega demands it. gamma at most
  1 / (L (1 + sqrt((1 - p) omega / (p n)))) with L^2 = mean_i L_i^2; under strong convexity with
  2 (1 - p) omega / (p n) under the root, and at most p / (2 mu).
- A client remembers the x that it last received, so 4P bytes come down a round. It computes one gradient, or two at
  two points on the same examples: the whole train split (batch_size = 0), or one minibatch, with which the
  uncompressed gradients are those of a minibatch too.
- The theory wants everyone in every round. Where clients are away all the same, means are over those who delivered,
  and a client that missed the last round, whose old x is not the server's, is silent in a round of differences. After
  a round in which nothing arrived, x has not moved and the next round is uncompressed, whatever the coin.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.dense import Dense
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, Stage
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientStep, stated_omega
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class MARINAHyper(GradientStep):
    """Hyper-parameters of MARINA."""

    dense_probability: float | None = Field(
        default=None, gt=0, le=1, description="chance of an uncompressed round, p; default: 1 / (1 + omega)"
    )


class MARINA(DistributedGradient):
    """Client state: the x that it last received, and in which round. Server: x, g, and whether g must be made anew.

    The model comes down under the name "restart" where g must be made anew, else under "model".
    """

    Hyper: ClassVar[type[MARINAHyper]] = MARINAHyper
    hyper: MARINAHyper
    paper: ClassVar[str] = "Gorbunov et al., ICML 2021"
    needs_one_omega: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"gradient": WeightedMean()}

    def is_dense(self, ctx: Context) -> bool:
        """The coin of this round: whether gradients are sent uncompressed. ValueError where p must be given."""
        p = self.hyper.dense_probability
        return ctx.plan.coin < (1 / (1 + stated_omega(ctx, "dense_probability")) if p is None else p)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"point": params, "round": torch.tensor(-1)}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        if "restart" in received:
            return {**self.start(received["restart"].decode()), "dense": torch.tensor(True)}
        dense = self.is_dense(ctx)
        carry = {**self.start(received["model"].decode()), "dense": torch.tensor(dense)}
        follows = not dense and int(state["round"]) == ctx.round - 1
        return {**carry, "previous": state["point"]} if follows else carry

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # A round of differences has the point before, too (which a client that missed it does not use).
        return 1.0 if ctx.round == 0 or self.is_dense(ctx) else 2.0

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        carry = super().step(carry, batch, stage=stage)
        if "previous" not in carry:
            return carry
        _, previous = self.value_and_grad(carry["previous"], batch)
        return {**carry, "gradient": tree.sub(carry["gradient"], previous)}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        state = {**state, "point": carry["params"], "round": torch.tensor(ctx.round)}
        if carry["dense"]:
            packet, _ = Dense().encode(carry["gradient"], {}, ctx.generator)
            return self.finished(state, {"gradient": packet}, carry, ctx)
        if "previous" in carry:
            return self.finished(state, {"gradient": carry["gradient"]}, carry, ctx)
        return self.finished(state, {}, carry, ctx)

    def init_server(self, params: Tree) -> State:
        return {"params": params, "gradient": tree.zeros_like(params), "restart": torch.tensor(True)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        # Raises here, before any client works, where p must be given and is not.
        self.is_dense(ctx)
        name = "restart" if server["restart"] else "model"
        return {name: ctx.downlink.encode(server["params"], {}, ctx.generator)[0]}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        dense = bool(server["restart"]) or self.is_dense(ctx)
        gradient = received["gradient"].result
        if not gradient:
            return {**server, "restart": torch.tensor(True)}, {}
        if not dense:
            gradient = tree.add(server["gradient"], gradient)
        params = tree.add(server["params"], gradient, -self.hyper.rate(ctx.round))
        return {"params": params, "gradient": gradient, "restart": torch.tensor(False)}, {"marina/dense": float(dense)}
