"""FullLength, an example of a method of your own: FedAvg whose server goes as far along the mean as its clients went.

FedAvg's server moves to the mean of the clients' models. If clients' changes have different directions, their mean is
shorter than each of them. FullLength keeps the direction of the mean and the length of the changes:
x <- x - eta_g sum_i p_i delta_i with

eta_g = min(most, sqrt(sum_i p_i ||delta_i||^2) / ||sum_i p_i delta_i||).

A client sends ||delta_i||^2 in addition to delta_i, in 4 bytes.
"""

import math

from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Field,
    Finished,
    Metrics,
    ModelState,
    Received,
    State,
    WeightedMean,
    scalar_packet,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining


class FullLengthHyper(LocalTraining):
    """The settings of local training, and a bound on the server's steps."""

    most: float = Field(default=3.0, ge=1, description="largest learning rate of the server")


class FullLength(FedAvg):
    """FedAvg whose server takes steps as long as those of its clients."""

    hyper: FullLengthHyper
    # The number beside the tree is sent as a packet that the method makes itself.
    capabilities = Capabilities(hands_over_trees=False)
    gather = {"delta": WeightedMean(), "square": WeightedMean()}

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        delta = self.progress(carry)
        square = scalar_packet("square", tree.norm(delta) ** 2)
        return self.finished(state, {"delta": delta, "square": square}, carry, ctx)

    def server_update(
        self, server: ModelState, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[ModelState, Metrics]:
        mean = received["delta"].result
        if not mean:
            return server, {}
        square = float(received["square"].result["square"])
        server_lr = min(self.hyper.most, math.sqrt(square) / max(tree.norm(mean), 1e-12))
        return {"params": tree.add(server["params"], mean, -server_lr)}, {"full_length/server_lr": server_lr}
