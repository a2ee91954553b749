"""FedAvg whose server takes the averaged delta for a gradient and steps with an optimizer of its own.

The optimizer moves once a round, and not in a round in which nothing arrives.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from rayfl.gather import Aggregate
from rayfl.methods.base import Context, Metrics
from rayfl.methods.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.methods.shared.optimizers import Optimizer
from rayfl.task import Task
from rayfl.tree import State, Tree


class ServerSteps(LocalTraining):
    """Hyper-parameters of local training and of a server that steps."""

    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")


class ServerStepping(FedAvg):
    """Clients and wires are FedAvg's. Server state: x, and the optimizer's own."""

    Hyper: ClassVar[type[ServerSteps]] = ServerSteps
    hyper: ServerSteps

    # Any: hyper-parameters are whatever the method's Hyper declares and validates.
    def __init__(self, task: Task, **hyper: Any) -> None:
        super().__init__(task, **hyper)
        self.server_optimizer = self.make_server_optimizer()

    @abstractmethod
    def make_server_optimizer(self) -> Optimizer:
        """The server's optimizer, as the hyper-parameters describe it."""

    def init_server(self, params: Tree) -> State:
        return {"params": params, "optimizer": self.server_optimizer.init(params)}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta = received["delta"].result
        if not delta:
            return server, {}
        params, state = self.server_optimizer.update(server["params"], delta, server["optimizer"], self.hyper.server_lr)
        return {"params": params, "optimizer": state}, {}
