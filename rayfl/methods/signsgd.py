"""signSGD with majority vote: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018,
Algorithm 3; with `momentum` its Algorithm 2, Signum, in every worker.

Workers send the signs of their gradients, sign(0) = +1, and the server sends back what most of them say. Everybody
takes the step x <- x - lr * sign(sum_i sign(g_i)) on a copy of the model, so that no model crosses the wire.

- A tie is 0 and moves nothing. It needs an even number of votes: then the answer takes two bits an entry, else one.
- All copies start from the common x_0, made from the seed, so that nobody downloads it. A worker whose copy is not the
  server's, because it was away or its vote was lost, first downloads the model (4 bytes an entry).
- Every vote counts the same, however many examples are behind it; `l2` is part of the gradient.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.dense import Dense
from rayfl.compress.votes import votes_packet
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, Sum
from rayfl.methods.base import Carry, Context, Finished, Metrics, Reply
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientStep
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class SignSGDHyper(GradientStep):
    """Hyper-parameters of signSGD with majority vote."""

    lr: float = Field(default=0.001, gt=0, description="how far every entry moves, delta")
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="beta of Signum: m <- beta m + (1 - beta) g; 0: signSGD"
    )
    weighting: Literal["uniform"] = Field(default="uniform", description="every vote counts the same")


class SignSGD(DistributedGradient):
    """Client state: its copy of the model, and m. Server's memory of a client: the version of its copy."""

    Hyper: ClassVar[type[SignSGDHyper]] = SignSGDHyper
    hyper: SignSGDHyper
    paper: ClassVar[str] = "Bernstein et al., signSGD, ICML 2018 (majority vote, Signum)"
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"signs": Sum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"params": params, **({"momentum": tree.zeros_like(params)} if self.hyper.momentum else {})}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(received["model"].decode() if "model" in received else state["params"])

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        direction, state = carry["gradient"], {**state, "params": carry["params"]}
        if self.hyper.momentum:
            fresh = tree.scale(direction, 1 - self.hyper.momentum)
            direction = tree.add(fresh, state["momentum"], self.hyper.momentum)
            state["momentum"] = direction
        return self.finished(state, {"signs": votes_packet(direction)}, carry, ctx)

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        return {**state, "params": self._moved(state["params"], received["votes"].decode(), ctx)}

    def init_server(self, params: Tree) -> State:
        votes = tree.map(lambda tensor: torch.zeros(tensor.shape, dtype=torch.int8), params)
        return {"params": params, "votes": votes, "ties": torch.tensor(False), "version": torch.tensor(0)}

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return {"version": torch.tensor(0)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        if server_memory["version"] == server["version"]:
            return Reply({}, server_memory)
        packet, _ = Dense().encode(server["params"], {}, ctx.generator)
        return Reply({"model": packet}, {"version": server["version"]})

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        signs = received["signs"]
        if not signs.count:
            return server, {}
        votes = tree.map(torch.sign, signs.sum)
        return {
            "params": self._moved(server["params"], votes, ctx),
            "votes": tree.map(lambda tensor: tensor.to(torch.int8), votes),
            "ties": torch.tensor(signs.count % 2 == 0),
            "version": server["version"] + 1,
        }, {}

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        packet = votes_packet(tree.map(Tensor.float, server["votes"]), ties=bool(server["ties"]))
        return Reply({"votes": packet}, {"version": server["version"]})

    def _moved(self, params: Tree, votes: Tree, ctx: Context) -> Tree:
        """x - lr * votes: the same bits at both ends, since the product is exact."""
        return tree.add(params, votes, -self.hyper.rate(ctx.round))
