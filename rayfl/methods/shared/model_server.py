"""Servers that send their model only as a reply, in rounds in which clients send messages."""

from abc import abstractmethod
from typing import TypedDict

import torch

from rayfl.methods.base import Context, KeptModel, ModelState, Reply, ServerHalf, Traits, Tree
from rayfl.methods.hook_types import encode_broadcast


class Exchanges(TypedDict):
    """A server's state, or its memory of a client, that counts exchanges."""

    exchanges: torch.Tensor  # all so far; in the memory: all when the client last got its model


class CountedExchanges(ServerHalf):
    """A server with rounds in which nothing is sent, and clients that may miss an exchange.

    Clients get their model in reply, in the round of the exchange, and download it later only if they missed one.
    `update` counts the exchanges. Down: the model as "model"; a subclass may reply with less.
    """

    @abstractmethod
    def current(self, server: Exchanges, ctx: Context) -> Tree:
        """The model that the client of `ctx` gets."""

    def init_server_memory(self, client: Traits, params: Tree) -> Exchanges:
        return {"exchanges": torch.tensor(0)}

    def personal_message(self, server: Exchanges, server_memory: Exchanges, ctx: Context) -> Reply:
        if server_memory["exchanges"] == server["exchanges"]:
            return Reply({}, server_memory)
        return CountedExchanges.reply(self, server, server_memory, ctx)

    def reply(self, server: Exchanges, server_memory: Exchanges, ctx: Context) -> Reply:
        return Reply(encode_broadcast({"model": self.current(server, ctx)}, ctx), {"exchanges": server["exchanges"]})


class ExchangedModel(ModelState, Exchanges):
    """Server state: the model of the last exchange, and the number of exchanges."""


class ExchangedModelServer(KeptModel, CountedExchanges):
    """A server whose exchanges send one model to all clients."""

    def init_server(self, params: Tree) -> ExchangedModel:
        return {"params": params, "exchanges": torch.tensor(0)}

    def current(self, server: ExchangedModel, ctx: Context) -> Tree:
        return server["params"]
