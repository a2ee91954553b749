"""FedMGDA+: Hu et al., Federated Learning Meets Multi-Objective Optimization, IEEE Transactions on Network Science and
Engineering 2022, Algorithm 1.

The server takes the shortest combination d of the normalised differences as its direction: if it is not 0, no client's
loss rises along it. A trust region keeps every weight within epsilon of 1/m: 0 is the mean of the normalised
differences, 1 leaves the weights free.

Where sources are silent: the weights come from the m x m Gram matrix in float64, by an active-set method; a client
whose difference is 0 gets no weight and does not count in m; server_lr_decay multiplies the step once a round.
"""

import math

import numpy as np
from pydantic import Field

from rayfl import tree
from rayfl.methods.base import Collect, Context, Delivered, Finished, Metrics, ModelServer, ModelState, Received, State
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.methods.shared.minimum_norm import gram, minimum_norm_weights


class FedMGDAHyper(LocalWork):
    """Hyper-parameters of FedMGDA+."""

    epsilon: float = Field(default=0.1, ge=0, le=1, description="how far a client's weight may be from 1/m")
    server_lr: float = Field(default=1.0, gt=0, description="length of the server's step along d, eta_g")
    server_lr_decay: float = Field(
        default=1.0, gt=0, le=1, description="the step of round r is server_lr * server_lr_decay ** r"
    )


class FedMGDA(GradientMethod, ModelServer, on_device=True, keeps_parts=True):
    """Server: x <- x - eta_g sum_i lambda_i delta_i / ||delta_i||."""

    hyper: FedMGDAHyper
    paper = "Hu et al., IEEE TNSE 2022"
    gather = {"delta": Collect()}

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished(state, {"delta": self.delta(carry)}, metrics=self.train_loss(carry, ctx))

    def server_update(
        self, server: ModelState, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[ModelState, Metrics]:
        deltas = [item for item in received["delta"].items.values() if isinstance(item, dict)]
        if not deltas:
            return server, {}
        products = gram(deltas)
        norms = np.sqrt(np.diag(products))
        moved = np.flatnonzero(norms)
        if not len(moved):
            return server, {"fedmgda/direction_norm": 0.0}
        cosines = products[np.ix_(moved, moved)] / np.outer(norms[moved], norms[moved])
        weights = self.weights(cosines)
        params, step = server["params"], self.hyper.server_lr * self.hyper.server_lr_decay**ctx.round
        for weight, client in zip(weights, moved, strict=True):
            params = tree.add(params, deltas[client], -step * float(weight / norms[client]))
        square = float(weights @ cosines @ weights)
        return {"params": params}, {"fedmgda/direction_norm": math.sqrt(max(0.0, square))}

    def weights(self, cosines: np.ndarray) -> np.ndarray:
        """lambda [m] of the normalised differences, whose Gram matrix is `cosines` [m, m]."""
        equal = 1 / len(cosines)
        return minimum_norm_weights(
            cosines, low=max(0.0, equal - self.hyper.epsilon), high=min(1.0, equal + self.hyper.epsilon)
        )
