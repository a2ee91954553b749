"""A server with rounds in which nothing crosses the wire, and clients that may miss an exchange."""

from abc import abstractmethod
from typing import TypedDict

import torch
from torch import Tensor

from rayfl.methods.base import Context, Download, Reply, ServerHalf, Traits, Tree, encoded


class Exchanges(TypedDict):
    """A server's state, or its memory of a client, that counts exchanges."""

    exchanges: Tensor  # all so far; in the memory: all when the client last got its model


class CountedExchanges(ServerHalf):
    """Clients get their model in reply, in the round of the exchange, and download it later only if they missed one.

    `update` counts the exchanges. Down: the model as "model".
    """

    @abstractmethod
    def current(self, server: Exchanges, ctx: Context) -> Tree:
        """The model that the client of `ctx` gets."""

    def init_server_memory(self, client: Traits, params: Tree) -> Exchanges:
        return {"exchanges": torch.tensor(0)}

    def download(self, server: Exchanges, ctx: Context) -> Download:
        return {}

    def personal_message(self, server: Exchanges, server_memory: Exchanges, ctx: Context) -> Reply:
        if server_memory["exchanges"] == server["exchanges"]:
            return Reply({}, server_memory)
        return self.reply(server, server_memory, ctx)

    def reply(self, server: Exchanges, server_memory: Exchanges, ctx: Context) -> Reply:
        return Reply(encoded({"model": self.current(server, ctx)}, ctx), {"exchanges": server["exchanges"]})
