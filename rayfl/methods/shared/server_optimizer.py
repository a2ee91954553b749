"""FedAvg whose server takes the averaged delta for a gradient and steps with an optimizer of its own.

The optimizer moves once a round, and not in a round in which nothing arrives.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from rayfl.compress.base import Message
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics
from rayfl.methods.shared.local_training import GradientMethod, LocalTraining
from rayfl.methods.shared.model_server import ModelServer
from rayfl.methods.shared.optimizers import Optimizer
from rayfl.tree import State, Tree


class ServerSteps(LocalTraining):
    """Hyper-parameters of local training and of a server that steps."""

    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")


class ServerStepping(GradientMethod, ModelServer):
    """Clients and wires are FedAvg's. Server state: x, and the optimizer's own."""

    Hyper: ClassVar[type[ServerSteps]] = ServerSteps
    hyper: ServerSteps

    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    @abstractmethod
    def make_server_optimizer(self) -> Optimizer:
        """The server's optimizer, as the hyper-parameters describe it."""

    @cached_property
    def server_optimizer(self) -> Optimizer:
        """The server's optimizer."""
        return self.make_server_optimizer()

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(received["model"].decode())

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return self.finished(state, {"delta": self.delta(carry)}, carry, ctx)

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
