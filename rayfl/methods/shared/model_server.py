"""A server that keeps one model and sends it to every participant, as most papers' servers do."""

from rayfl.methods.base import Context, Download, ModelState, ServerHalf, Tree


class ModelServer(ServerHalf):
    """Server state: the model x as "params"; subclasses say how it moves (`update`). Down: x as "model"."""

    def init_server(self, params: Tree) -> ModelState:
        return {"params": params}

    def model(self, server: ModelState) -> Tree:
        return server["params"]

    def download(self, server: ModelState, ctx: Context) -> Download:
        return {"model": server["params"]}
