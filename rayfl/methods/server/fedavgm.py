"""FedAvgM: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, arXiv 1909.06335, 2019.

The server keeps heavy-ball momentum over the averaged deltas: v <- beta v + delta, x <- x - eta_g v. The new delta
counts in full (no 1 - beta), and there is no Nesterov step. A round in which nothing arrives leaves x and v alone.
"""

from pydantic import Field

from rayfl.methods.base import Capabilities
from rayfl.methods.shared.optimizers import SGD, Optimizer
from rayfl.methods.shared.server_optimizer import ServerStepping, ServerSteps


class FedAvgMHyper(ServerSteps):
    """Hyper-parameters of FedAvgM; `momentum` is that of the clients' SGD."""

    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of the server, beta")


class FedAvgM(ServerStepping):
    """Server state: x, and v as the optimizer's velocity."""

    hyper: FedAvgMHyper
    paper = "Hsu et al., arXiv 1909.06335"
    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    @property
    def server_optimizer(self) -> Optimizer:
        return SGD(momentum=self.hyper.server_momentum)
