"""A server of one model, of which each client keeps the part under its mask.

It sends each client the entries of its mask and averages every entry over the clients that sent it. Both ends remember
the mask, so that positions are sent only in the rounds in which a client has changed it.
"""

import torch

from rayfl.compress.masks import known_support_packet
from rayfl.compress.sparse import sparse_packet
from rayfl.methods.base import (
    Carry,
    Context,
    ElementwiseMean,
    KeptModel,
    Message,
    Method,
    ModelState,
    Packet,
    Received,
    Reply,
    Traits,
    Tree,
)
from rayfl.methods.shared import masks

WEIGHTS = "weights"
"""The message, both ways."""


class MaskedServer(Method, KeptModel):
    """Each entry of x becomes the mean over the clients that keep it; an entry that no client keeps does not change.

    A client's model is x under its mask, and after local training the one that it has trained.
    """

    gather = {WEIGHTS: ElementwiseMean("sent")}

    def eval_begin(self, state: masks.Masked, model: Tree | None, carry: Carry | None, ctx: Context) -> ModelState:
        if carry is not None:
            return {"params": carry["params"]}
        assert model is not None, "the server has a global model"
        return {"params": masks.masked(model, state["mask"])}

    def final_model(self, state: ModelState, server: ModelState) -> Tree:
        """The model that the client has trained last."""
        return state["params"]

    def init_server_memory(self, client: Traits, params: Tree) -> masks.Masked:
        return {"mask": masks.everything(params)}

    def personal_message(self, server: ModelState, server_memory: masks.Masked, ctx: Context) -> Reply:
        return Reply({WEIGHTS: known_support_packet(server["params"], server_memory["mask"])}, server_memory)

    def store_uplink(self, server_memory: masks.Masked, message: Message, ctx: Context) -> masks.Masked:
        return {"mask": message[WEIGHTS].support()}

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        mean, held = received[WEIGHTS].result, received[WEIGHTS].weights
        return {"params": {n: torch.where(held[n] > 0, mean[n], old) for n, old in server["params"].items()}}


def weights_packet(params: Tree, mask: Tree, known: Tree) -> Packet:
    """A client's message: the entries of its mask, with their positions if the server knows another mask."""
    unchanged = all(torch.equal(mask[name], known[name]) for name in mask)
    return known_support_packet(params, mask) if unchanged else sparse_packet(params, mask)
