"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.

Clients send the model difference instead of the model, which is the same average and can be compressed.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, ServerHalf
from rayfl.methods.shared.local_training import GradientMethod
from rayfl.tree import State, Tree


class FedAvg(GradientMethod, ServerHalf):
    """Server: x <- x - sum_i p_i delta_i with p_i by samples or uniform."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(received["model"].decode())

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        message, weight = self.weigh({"delta": self.progress(carry)}, ctx)
        return Finished(state, message, weight, self.train_loss(carry, ctx))

    def init_server(self, params: Tree) -> State:
        return {"params": params}

    def model(self, server: State) -> Tree:
        return server["params"]

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"model": ctx.downlink.encode(server["params"], {}, ctx.generator)[0]}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta = received["delta"].result
        return ({"params": tree.sub(server["params"], delta)} if delta else server), {}
