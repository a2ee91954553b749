"""LAG with the rule at the server, LAG-PS: Chen, Giannakis, Sun, Yin, LAG: Lazily Aggregated Gradient for
Communication-Efficient Distributed Learning, NeurIPS 2018.

The server knows how far x moved since a client last uploaded, and a bound L on how fast gradients change with it: it
sends the model, and so asks for an upload, only where L^2 ||x_i - x^k||^2 > (1 / lr^2) sum_{d=1..D} xi
||x^{k+1-d} - x^{k-d}||^2, with x_i the model of the client's last upload. Everybody is asked once. The rest is `lag`.

One L serves all clients (the paper has one each). A client that is not asked costs no bytes; rayfl's rounds still give
it a step to compute, which is thrown away, so that its simulated time counts as if it had worked.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate
from rayfl.methods.base import Carry, Context, Finished, Metrics, Reply
from rayfl.methods.lag import LAG, LAGHyper
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class LAGPSHyper(LAGHyper):
    """Hyper-parameters of LAG-PS."""

    smoothness: float = Field(default=1.0, gt=0, description="Lipschitz constant of every client's gradient, L")


class LAGPS(LAG):
    """Client state: the gradient that the server has of it.

    Server's memory of a client: x_i, the model of its last upload.
    """

    Hyper: ClassVar[type[LAGPSHyper]] = LAGPSHyper
    hyper: LAGPSHyper
    paper: ClassVar[str] = "Chen et al., LAG, NeurIPS 2018 (LAG-PS)"

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"sent": tree.zeros_like(params)}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        asked = "model" in received
        carry = super().begin(state, received, ctx) if asked else self.start(ctx.initial)
        return {**carry, "asked": torch.tensor(asked)}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        if not carry["asked"]:
            return Finished(state, None)
        return self.upload(state, tree.sub(carry["gradient"], state["sent"]), carry, ctx)

    def init_server(self, params: Tree) -> State:
        return {**super().init_server(params), "steps": torch.zeros(self.hyper.num_steps)}

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return {"model": params, "uploaded": torch.tensor(False)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        change = self.hyper.smoothness**2 * tree.norm(tree.sub(server["params"], server_memory["model"])) ** 2
        if server_memory["uploaded"] and change <= self.tolerated(server["steps"], ctx):
            return Reply({}, server_memory)
        message = super().broadcast(server, ctx)
        # The memory of a client that vanishes after this download stays as before: it holds the last upload's model.
        return Reply(message, {"model": message["model"].decode(), "uploaded": torch.tensor(True)})

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        after, metrics = super().server_update(server, received, delivered, ctx)
        step = tree.norm(tree.sub(after["params"], server["params"])) ** 2
        return {**after, "steps": torch.cat([torch.tensor([step]), server["steps"][:-1]])}, metrics
