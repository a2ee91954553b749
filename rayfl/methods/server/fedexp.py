"""FedExP: Jhunjhunwala, Wang, Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1.

If clients' changes have different directions, their mean is shorter than each of them. FedExP's server takes a longer
step along the mean than FedAvg's: x <- x - eta_g mean_S delta_i with

eta_g = max(1, mean_S ||delta_i||^2 / (2 (||mean_S delta_i||^2 + epsilon))).

- Both means have the same weights, by default uniform as in the paper; the authors' code weighs by examples, multiplies
  epsilon by m, the number of clients, and lowers it from round to round as it lowers eta_l^2.
- If clients differ, mean delta falls towards 0 near the optimum and ||delta_i|| does not, so eta_g grows until epsilon
  stops it. Watch the metric `fedexp/server_lr`, and raise epsilon if it explodes.
- The model that is evaluated is the mean of the last two x, as in the paper; `judged="last"` takes x. The training is
  the same to the bit.
- Equal deltas give eta_g = 1, which is FedAvg; m orthogonal ones of equal length give m / 2.
- A client sends ||delta_i||^2, of the delta before compression, in 4 bytes: the server sees only sums of the deltas.
- Clients keep nothing, and a round in which nothing arrives changes nothing.
"""

from typing import Literal

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
    Tree,
    WeightedMean,
    scalar_packet,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, Weighting


class FedExPHyper(LocalTraining):
    """Hyper-parameters of FedExP."""

    weighting: Weighting = Field(default="uniform", description="weight of a client in both means")
    epsilon: float = Field(default=1e-3, gt=0, description="added to the squared norm of the mean delta")
    judged: Literal["mean", "last"] = Field(
        default="mean", description="the evaluated model: the mean of the last two x, or the last x"
    )


class FedExPServer(ModelState):
    """Server state, beside x."""

    previous: Tree  # x before the last round in which something arrived


class FedExP(FedAvg):
    """Up: delta_i, and ||delta_i||^2 in 4 bytes."""

    hyper: FedExPHyper
    paper = "Jhunjhunwala et al., ICLR 2023"
    capabilities = Capabilities(on_device=True, keeps_parts=True, hands_over_trees=False)
    gather = {"delta": WeightedMean(), "square": WeightedMean()}
    difference = ""

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        delta = self.progress(carry)
        square = scalar_packet("square", tree.norm(delta) ** 2)
        return self.finished(state, {"delta": delta, "square": square}, carry, ctx)

    def init_server(self, params: Tree) -> FedExPServer:
        return {"params": params, "previous": params}

    def server_update(
        self, server: FedExPServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FedExPServer, Metrics]:
        mean = received["delta"].result
        if not mean:
            return server, {}
        square = float(received["square"].result["square"])
        server_lr = max(1.0, square / (2 * (tree.norm(mean) ** 2 + self.hyper.epsilon)))
        x = server["params"]
        return {"params": tree.add(x, mean, -server_lr), "previous": x}, {"fedexp/server_lr": server_lr}

    def model(self, server: FedExPServer) -> Tree:
        x = server["params"]
        return x if self.hyper.judged == "last" else tree.scale(tree.add(x, server["previous"]), 0.5)
