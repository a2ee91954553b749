"""FedAvg whose server treats the averaged delta as a gradient, and steps with an optimizer of its own.

The optimizer takes one step per round, and none in a round in which nothing arrives.
"""

from abc import abstractmethod

from rayfl.methods.base import Context, Field, ModelState, Received, State, Tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.methods.shared.optimizers import Optimizer


class ServerSteps(LocalTraining):
    """Hyper-parameters of local training and of a server that steps."""

    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")


class StepperState(ModelState):
    """The state of a server that steps."""

    optimizer: State


class ServerStepping(FedAvg):
    """FedAvg's clients and messages, and a server that steps."""

    hyper: ServerSteps

    @property
    @abstractmethod
    def server_optimizer(self) -> Optimizer:
        """The server's optimizer, made from the hyper-parameters."""

    def init_server(self, params: Tree) -> StepperState:
        return {"params": params, "optimizer": self.server_optimizer.init(params)}

    def update(self, server: StepperState, received: Received, ctx: Context) -> StepperState:
        delta, lr = received["delta"].result, self.hyper.server_lr
        params, state = self.server_optimizer.update(server["params"], delta, server["optimizer"], lr)
        return {"params": params, "optimizer": state}
