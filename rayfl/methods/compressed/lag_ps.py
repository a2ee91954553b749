"""LAG with the rule at the server, LAG-PS: Chen, Giannakis, Sun, Yin, LAG: Lazily Aggregated Gradient for
Communication-Efficient Distributed Learning, NeurIPS 2018.

The server knows how far x moved since a client's last upload, and a Lipschitz bound L of the gradients: it sends a
client the model, and so asks for an upload, only if L^2 ||x_i - x^k||^2 > (1 / lr^2) sum_{d=1..D} xi
||x^{k+1-d} - x^{k-d}||^2, with x_i the model of the client's last upload. At first all clients are asked. The rest is
as in `lag`.

One L is used for all clients (the paper has one per client). A client that is not asked has no bytes, work or time.
"""

from typing import TypedDict

import torch

from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    Metrics,
    Received,
    Reply,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.compressed.lag import LAG, NEVER_LAZY, Known, LAGHyper, LAGServer
from rayfl.methods.hook_types import encode_broadcast
from rayfl.methods.shared.distributed_gradient import GradientCarry


class LAGPSHyper(LAGHyper):
    """Hyper-parameters of LAG-PS."""

    smoothness: float = Field(
        default=1.0, gt=0, description="Lipschitz constant of every client's gradient, L", json_schema_extra=NEVER_LAZY
    )


class LAGPSServer(LAGServer):
    """Server state."""

    steps: torch.Tensor  # the last squared steps of x [num_steps]


class LAGPSMemory(TypedDict):
    """The server's memory of a client."""

    model: Tree  # x_i, the model of its last upload
    uploaded: torch.Tensor


class LAGPS(LAG):
    """LAG whose server asks for the uploads."""

    hyper: LAGPSHyper
    paper = "Chen et al., LAG, NeurIPS 2018 (LAG-PS)"
    capabilities = Capabilities(on_device=True, may_be_silent=False)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> Known:
        return {"sent": tree.zeros_like(params)}

    def has_work(self, received: Message, ctx: Context) -> bool:
        # Whether the server asks for an upload.
        return "model" in received

    def finish(self, state: Known, carry: GradientCarry, ctx: Context) -> Finished:
        return self.upload(state, tree.sub(carry["gradient"], state["sent"]), carry, ctx)

    def init_server(self, params: Tree) -> LAGPSServer:
        return {**super().init_server(params), "steps": torch.zeros(self.hyper.num_steps)}

    def init_server_memory(self, client: Traits, params: Tree) -> LAGPSMemory:
        return {"model": params, "uploaded": torch.tensor(False)}

    def download(self, server: LAGPSServer, ctx: Context) -> Download:
        return {}

    def personal_message(self, server: LAGPSServer, server_memory: LAGPSMemory, ctx: Context) -> Reply:
        change = self.hyper.smoothness**2 * tree.norm(tree.sub(server["params"], server_memory["model"])) ** 2
        if server_memory["uploaded"] and change <= self.tolerated(server["steps"], ctx):
            return Reply({}, server_memory)
        message = encode_broadcast(super().download(server, ctx), ctx)
        # If the client vanishes after this download, its memory keeps the model of its last upload.
        return Reply(message, {"model": message["model"].decode(), "uploaded": torch.tensor(True)})

    def server_update(
        self, server: LAGPSServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[LAGPSServer, Metrics]:
        after, metrics = super().server_update(server, received, delivered, ctx)
        step = tree.norm(tree.sub(after["params"], server["params"])) ** 2
        return {**after, "steps": torch.cat([torch.tensor([step]), server["steps"][:-1]])}, metrics
