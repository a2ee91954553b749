"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.

Clients send the model difference instead of the model, which is the same average and can be compressed.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics
from rayfl.methods.shared.local_training import GradientMethod
from rayfl.methods.shared.model_server import ModelServer
from rayfl.tree import State


class FedAvg(GradientMethod, ModelServer):
    """Client: local steps from the model x that came down. Up: delta_i = x - x_i, with x_i the trained model.

    Server: x <- x - sum_i p_i delta_i with p_i by samples or uniform.
    """

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(received["model"].decode())

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return self.finished(state, {"delta": self.delta(carry)}, carry, ctx)

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta = received["delta"].result
        return ({"params": tree.sub(server["params"], delta)} if delta else server), {}
