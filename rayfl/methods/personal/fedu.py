"""FedU: Dinh, Vu, Tran, Dao, Zhang, FedU: A Unified Framework for Federated Multi-Task Learning with Laplacian
Regularization, 2021; also in WEN Hao's slides.

Clients have models w_k of their own, and a graph says which clients are related. A round is R local steps, w_k to
w_k^R, and then at the server, for all k at once, w_k <- w_k^R - mu_t eta sum_l a_kl (w_k^R - w_l^R). As a_kl = a_lk,
this does not change sum_k w_k.

- One coefficient, lap_step = mu_t eta, is given; it does not follow the learning rate. A pair counts once (see
  shared/laplacian.py).
- The graph is the experiment's topology, a_kl the weight of its link: 1 where uniform, else Metropolis'.
- The server has all w_k and sends no common model: a client that delivered gets its own w_k back in the same round. For
  an absent client w_k^R = w_k, and the server's step changes this w_k too. The client downloads its w_k when it comes
  back, and is evaluated until then with the model that it has. A round in which nobody delivers changes nothing.
- Up goes w_k - w_k^R. All start from one model, so round 0 begins without a download.
- The authors' code leaves the sum over neighbours out, and would update one client after another.
The server's state has all models, N times the parameters; `dfedu` has none.
"""

import numpy as np
import torch

from rayfl.methods.base import (
    Capabilities,
    Collect,
    Context,
    Finished,
    Message,
    ModelState,
    Received,
    Topology,
    Tree,
)
from rayfl.methods.shared.laplacian import LaplacianHyper, check_lap_step
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, OwnModel
from rayfl.methods.shared.model_server import CountedExchanges, Exchanges


class FedUServer(Exchanges):
    """Server state, beside the number of exchanges."""

    models: Tree  # all w_k, each tensor stacked [N, ...]


class FedU(OwnModel, GradientMethod, CountedExchanges):
    """Client state: the w_k that it had last. Server: all w_k."""

    hyper: LaplacianHyper
    paper = "Dinh et al., FedU, 2021"
    capabilities = Capabilities(on_device=True, uses_graph=True, newcomer="undefined")
    gather = {"change": Collect()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        check_lap_step(self.hyper.lap_step, topology, num_clients, seed)

    def finish(self, state: ModelState, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished({"params": carry["params"]}, {"change": self.delta(carry)}, metrics=self.train_loss(carry, ctx))

    def receive_reply(self, state: ModelState, received: Message, ctx: Context) -> ModelState:
        return {"params": received["model"].decode()}

    def init_server(self, params: Tree) -> FedUServer:
        # One row until the number of clients is known, in the first update.
        return {"models": {name: tensor[None] for name, tensor in params.items()}, "exchanges": torch.tensor(0)}

    def model(self, server: FedUServer) -> Tree:
        return {}

    def update(self, server: FedUServer, received: Received, ctx: Context) -> FedUServer:
        assert ctx.links is not None
        models = {}
        for name, before in server["models"].items():
            trained = before.expand(ctx.num_clients, *before.shape[1:]).clone()
            for client, change in received["change"].items.items():
                assert isinstance(change, dict)
                trained[client] -= change[name]
            models[name] = laplacian_step(trained, ctx.links, self.hyper.lap_step)
        return {"models": models, "exchanges": server["exchanges"] + 1}

    def current(self, server: FedUServer, ctx: Context) -> Tree:
        return {name: tensor[ctx.traits.id].clone() for name, tensor in server["models"].items()}


def laplacian_step(stacked: torch.Tensor, links: np.ndarray, step: float) -> torch.Tensor:
    """w_k - step sum_l a_kl (w_k - w_l) for all k at once, from w [N, ...] and a [N, N]."""
    a = torch.from_numpy(links)
    laplacian = torch.diag(a.sum(dim=1)) - a
    # A parameter without dimensions is stacked to [N].
    pull = laplacian.to(stacked.dtype) @ stacked.reshape(len(stacked), -1)
    return stacked - step * pull.view(stacked.shape)
