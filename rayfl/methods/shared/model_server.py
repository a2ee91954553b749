"""A server that keeps one model and sends it to every participant, which is what most papers' servers do."""

from rayfl.compress.base import Message
from rayfl.methods.base import Context, ServerHalf
from rayfl.tree import State, Tree


class ModelServer(ServerHalf):
    """Server state: the model x as "params"; subclasses say how it moves (`server_update`). Down: x as "model"."""

    def init_server(self, params: Tree) -> State:
        return {"params": params}

    def model(self, server: State) -> Tree:
        return server["params"]

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"model": ctx.downlink.encode(server["params"], {}, ctx.generator)[0]}
