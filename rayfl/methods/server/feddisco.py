"""FedDisco: Ye, Xu, Wang, Xu, Chen, Wang, FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023,
Algorithm 1.

FedAvg weighs clients by their numbers of examples alone. FedDisco lowers the weight of clients whose classes are far
from balanced: with n_k the client's share of the examples of this round, and d_k the distance of its class shares p_k
from equal ones q,

weight of k = max(0, n_k - a d_k + b), divided by the sum of all; n_k if all of them are 0.

- d_k is the Kullback-Leibler divergence sum_c p_kc log(p_kc / q_c), 0 log 0 = 0, or with `distance="l2"` the Euclidean
  distance ||p_k - q||. The paper's q is the distribution of the test data that count, which is balanced there.
- A client tells its class counts once, when the server first reaches it; with them the server sees what is in its data.
- The sums over clients are over those whose message arrived, so n_k and the weights change from round to round.
- `a` = 0.5 and `b` = 0.1 are those of the authors' code. With a = b = 0 it is FedAvg.
- The server needs each message by itself, so it holds as many models as clients deliver.
"""

from typing import Literal

import numpy as np

from rayfl.methods.base import (
    Capabilities,
    Collect,
    Context,
    Delivered,
    Field,
    Finished,
    Metrics,
    ModelServer,
    ModelState,
    Received,
    State,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class FedDiscoHyper(LocalWork):
    """Hyper-parameters of FedDisco."""

    a: float = Field(default=0.5, ge=0, description="how much a client's distance from balance lowers its weight")
    b: float = Field(default=0.1, ge=0, description="added to every weight")
    distance: Literal["kl", "l2"] = Field(
        default="kl", description="distance of class shares from equal ones: Kullback-Leibler or Euclidean"
    )


class FedDisco(GradientMethod, ModelServer):
    """Down: x. Up: delta_i, and once the client's class counts. Server: x <- x - sum_k weight_k delta_k."""

    hyper: FedDiscoHyper
    paper = "Ye et al., ICML 2023"
    capabilities = Capabilities(on_device=True, keeps_parts=True, label_counts=True)
    gather = {"delta": Collect()}

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished(state, {"delta": self.delta(carry)}, metrics=self.train_loss(carry, ctx))

    def server_update(
        self, server: ModelState, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[ModelState, Metrics]:
        deltas = {client: delta for client, delta in received["delta"].items.items() if isinstance(delta, dict)}
        if not deltas:
            return server, {}
        clients = sorted(deltas)
        weights = self.weights(np.array([ctx.traits_of(client).label_counts for client in clients]))
        params = server["params"]
        for client, weight in zip(clients, weights, strict=True):
            params = tree.add(params, deltas[client], -float(weight))
        return {"params": params}, {"feddisco/largest_weight": float(weights.max())}

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """The weights, float64 [m], of clients with these counts by class, int [m, C]."""
        numbers = counts.sum(axis=1)
        shares = counts / numbers[:, None]
        equal = 1 / counts.shape[1]
        if self.hyper.distance == "l2":
            distances = np.linalg.norm(shares - equal, axis=1)
        else:
            distances = (shares * np.log(np.where(shares > 0, shares / equal, 1.0))).sum(axis=1)
        plain = numbers / numbers.sum()
        weights = np.maximum(0.0, plain - self.hyper.a * distances + self.hyper.b)
        return weights / weights.sum() if weights.any() else plain
