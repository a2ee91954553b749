"""FedExP: Jhunjhunwala, Wang, Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1.

FedAvg's server moves to the mean of the clients' models. If clients' changes have different directions, their mean is
shorter than each of them, and FedExP takes a longer step along it: x <- x - eta_g sum_i p_i delta_i with

eta_g = max(1, sum_i p_i ||delta_i||^2 / (2 (||sum_i p_i delta_i||^2 + epsilon))).

A client sends ||delta_i||^2 in addition to delta_i, in 4 bytes. The paper evaluates the mean of the last two x; we
evaluate the last x.
"""

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


class FedExPHyper(LocalTraining):
    """The settings of local training, and epsilon."""

    epsilon: float = Field(default=1e-3, gt=0, description="added to the squared norm of the mean")


class FedExP(FedAvg):
    """FedAvg whose server extrapolates."""

    hyper: FedExPHyper
    paper = "Jhunjhunwala et al., ICLR 2023"
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
        server_lr = max(1.0, square / (2 * (tree.norm(mean) ** 2 + self.hyper.epsilon)))
        return {"params": tree.add(server["params"], mean, -server_lr)}, {"fedexp/server_lr": server_lr}
