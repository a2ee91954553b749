"""FedACG: Kim, Kim, Han, Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024,
Algorithm 1.

The server sends the point to which its momentum would carry it, y0 = x + lam m, and clients start there: client i
minimises f_i(y) + beta / 2 ||y - y0||^2 by local steps and sends delta_i = y0 - y_i. Then

m <- lam m - mean_S delta_i,   x <- x + m.

- lam = beta = 0 is FedAvg. With one full-batch step this is Nesterov's accelerated gradient, whatever beta is.
- The mean is uniform, as in the authors' code. So are the defaults: lam = 0.85 and a penalty of 0.001 ||y - y0||^2, so
  beta = 0.002.
- The model that is evaluated is x, and not the y0 that clients get.
- A round in which nothing arrives leaves x and m alone. Clients keep nothing, so absences only change the mean.
- The recorded training loss is f_i, without the penalty.
"""

from rayfl.methods.base import Capabilities, Context, Download, Field, ModelState, Received, Tree, tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, Weighting


class FedACGHyper(LocalTraining):
    """Hyper-parameters of FedACG; `momentum` is that of the clients' SGD."""

    weighting: Weighting = Field(default="uniform", description="weight of a client in the average")
    lam: float = Field(default=0.85, ge=0, lt=1, description="momentum of the server, lambda")
    beta: float = Field(default=0.002, ge=0, description="weight of the proximal term beta / 2 ||y - y0||^2")


class FedACGServer(ModelState):
    """Server state, beside x."""

    momentum: Tree  # m


class FedACG(FedAvg):
    """Down: y0 = x + lam m. Up: delta_i = y0 - y_i."""

    hyper: FedACGHyper
    paper = "Kim et al., CVPR 2024"
    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)
    difference = ""

    def direction(self, carry: LocalCarry, gradient: Tree) -> Tree:
        return tree.add(gradient, tree.sub(carry["params"], carry["received"]), self.hyper.beta)

    def init_server(self, params: Tree) -> FedACGServer:
        return {"params": params, "momentum": tree.zeros_like(params)}

    def download(self, server: FedACGServer, ctx: Context) -> Download:
        return {"model": tree.add(server["params"], server["momentum"], self.hyper.lam)}

    def update(self, server: FedACGServer, received: Received, ctx: Context) -> FedACGServer:
        momentum = tree.sub(tree.scale(server["momentum"], self.hyper.lam), received["delta"].result)
        return {"params": tree.add(server["params"], momentum), "momentum": momentum}
