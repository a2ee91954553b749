"""signSGD with majority vote: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018,
Algorithm 3; with `momentum` its Algorithm 2, Signum, in every worker.

Workers send the signs of their gradients, sign(0) = +1, and the server sends back the majority. Workers and server
take the step x <- x - lr * sign(sum_i sign(g_i)) on their copies of the model, so that no model is sent.

- A tie is 0 and changes nothing. Ties need an even number of votes: then the answer takes two bits per entry, else one.
- All copies start from the common x_0, drawn from the seed, so it is not sent. A worker whose copy is not the server's,
  because it was absent or its vote was lost, first downloads the model (4 bytes per entry).
- Every vote counts the same, however many examples are behind it; `l2` is part of the gradient.
"""

from typing import Literal, NotRequired

import torch

from rayfl.compress.sign import votes_packet
from rayfl.methods.base import (
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Received,
    Reply,
    Sum,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientCarry, GradientStep
from rayfl.methods.shared.model_server import ExchangedModel, ExchangedModelServer, Exchanges


class SignSGDHyper(GradientStep):
    """Hyper-parameters of signSGD with majority vote."""

    lr: float = Field(default=0.001, gt=0, description="how far every entry moves, delta")
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="beta of Signum: m <- beta m + (1 - beta) g; 0: signSGD"
    )
    weighting: Literal["uniform"] = Field(default="uniform", description="every vote counts the same")


class SignSGDState(ModelState):
    """Client state, beside its copy of the model."""

    momentum: NotRequired[Tree]  # m, of Signum


class SignSGDServer(ExchangedModel):
    """Server state: the model, the number of exchanges, and the last answer."""

    votes: Tree
    ties: torch.Tensor


class SignSGD(DistributedGradient, ExchangedModelServer):
    """Clients send signs, and the server sends back the majority of each."""

    hyper: SignSGDHyper
    paper = "Bernstein et al., signSGD, ICML 2018 (majority vote, Signum)"
    capabilities = Capabilities(on_device=True, own_compression=True)
    gather = {"signs": Sum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> SignSGDState:
        state: SignSGDState = {"params": params}
        return {**state, "momentum": tree.zeros_like(params)} if self.hyper.momentum else state

    def finish(self, state: SignSGDState, carry: GradientCarry, ctx: Context) -> Finished:
        direction = carry["gradient"]
        state = {**state, "params": carry["params"]}
        if "momentum" in state:
            fresh = tree.scale(direction, 1 - self.hyper.momentum)
            direction = tree.add(fresh, state["momentum"], self.hyper.momentum)
            state["momentum"] = direction
        return self.finished(state, {"signs": votes_packet(direction)}, carry, ctx)

    def receive_reply(self, state: SignSGDState, received: Message, ctx: Context) -> SignSGDState:
        return {**state, "params": self._moved(state["params"], received["votes"].decode(), ctx)}

    def init_server(self, params: Tree) -> SignSGDServer:
        votes = tree.map(lambda tensor: torch.zeros(tensor.shape, dtype=torch.int8), params)
        return {**super().init_server(params), "votes": votes, "ties": torch.tensor(False)}

    def download(self, server: SignSGDServer, ctx: Context) -> Download:
        return {}

    def update(self, server: SignSGDServer, received: Received, ctx: Context) -> SignSGDServer:
        signs = received["signs"]
        votes = tree.map(torch.sign, signs.sum)
        return {
            "params": self._moved(server["params"], votes, ctx),
            "votes": tree.map(lambda tensor: tensor.to(torch.int8), votes),
            "ties": torch.tensor(signs.count % 2 == 0),
            "exchanges": server["exchanges"] + 1,
        }

    def reply(self, server: SignSGDServer, server_memory: Exchanges, ctx: Context) -> Reply:
        packet = votes_packet(tree.map(torch.Tensor.float, server["votes"]), ties=bool(server["ties"]))
        return Reply({"votes": packet}, {"exchanges": server["exchanges"]})

    def _moved(self, params: Tree, votes: Tree, ctx: Context) -> Tree:
        """x - lr * votes: the same bits at both ends, since the product is exact."""
        return tree.add(params, votes, -self.hyper.rate(ctx.round))
