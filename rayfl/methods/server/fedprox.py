"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

Client i minimises f_i(y) + mu / 2 ||y - x_t||^2 by local steps, with x_t the model that it received; the rest is
FedAvg, and mu = 0 is FedAvg itself.

- All clients do the same amount of work (`epochs` or `steps`); the paper lets slow clients do less.
- The mean is by examples like FedAvg's; the paper draws clients by their examples and takes a plain one.
- The recorded training loss is f_i, without the proximal term.
"""

from rayfl.methods.base import Capabilities, Field, Tree, tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining


class FedProxHyper(LocalTraining):
    """Hyper-parameters of FedProx."""

    mu: float = Field(default=0.01, ge=0, description="weight of the proximal term mu / 2 ||y - x_t||^2")


class FedProx(FedAvg):
    """Client: y <- y - eta_l (g_i(y) + mu (y - x_t))."""

    hyper: FedProxHyper
    paper = "Li et al., MLSys 2020"
    capabilities = Capabilities(
        on_device=True, server_on_device=True, whole_stacks=True, keeps_parts=True, takes_stale=True
    )

    def direction(self, carry: LocalCarry, gradient: Tree) -> Tree:
        return tree.add(gradient, tree.sub(carry["params"], carry["received"]), self.hyper.mu)
