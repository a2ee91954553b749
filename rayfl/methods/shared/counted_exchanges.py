"""A server with rounds in which nothing crosses the wire, and clients that may miss an exchange."""

from abc import abstractmethod

import torch

from rayfl.compress.base import Message
from rayfl.methods.base import Context, Reply, ServerHalf
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class CountedExchanges(ServerHalf):
    """Clients get their model in reply, in the round of the exchange, and download it later only if they missed one.

    Server: how many exchanges there were, as "exchanges"; `server_update` counts. Server's memory of a client: how many
    there had been when the client last got its model. Down: the model as "model".
    """

    @abstractmethod
    def current(self, server: State, ctx: Context) -> Tree:
        """The model that the client of `ctx` gets."""

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return {"exchanges": torch.tensor(0)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        if server_memory["exchanges"] == server["exchanges"]:
            return Reply({}, server_memory)
        return self.reply(server, server_memory, ctx)

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        message = {"model": ctx.downlink.encode(self.current(server, ctx), {}, ctx.generator)[0]}
        return Reply(message, {"exchanges": server["exchanges"]})
