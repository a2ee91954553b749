"""FedMGDA+: Hu et al., Federated Learning Meets Multi-Objective Optimization, IEEE Transactions on Network Science and
Engineering 2022, Algorithm 1.

The server takes the shortest combination d of the normalised differences as its direction: if it is not 0, no client's
loss rises along it. A trust region keeps every weight within epsilon of 1/m: 0 is the mean of the normalised
differences, 1 leaves the weights free.

Where sources are silent: the weights come from the m x m Gram matrix in float64, by an active-set method; a client
whose difference is 0 gets no weight and does not count in m; server_lr_decay multiplies the step once per round.
"""

import math
from collections.abc import Sequence

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
    RayflError,
    Received,
    State,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class FedMGDAHyper(LocalWork):
    """Hyper-parameters of FedMGDA+."""

    epsilon: float = Field(default=0.1, ge=0, le=1, description="how far a client's weight may be from 1/m")
    server_lr: float = Field(default=1.0, gt=0, description="length of the server's step along d, eta_g")
    server_lr_decay: float = Field(
        default=1.0, gt=0, le=1, description="the step of round r is server_lr * server_lr_decay ** r"
    )


class FedMGDA(GradientMethod, ModelServer):
    """Server: x <- x - eta_g sum_i lambda_i delta_i / ||delta_i||."""

    hyper: FedMGDAHyper
    paper = "Hu et al., IEEE TNSE 2022"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
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


COLUMNS = 1 << 16
"""The number of entries of each vector that are converted to float64 at once."""

TOLERANCE = 1e-13
"""How far a gradient may violate the optimality conditions, as a share of the largest entry of G."""


def gram(vectors: Sequence[tree.Tree]) -> np.ndarray:
    """Inner products over all entries, float64 [m, m]; takes m * 65,536 * 8 bytes in addition to the vectors."""
    product = np.zeros((len(vectors), len(vectors)))
    for name, first in vectors[0].items():
        flat = [vector[name].detach().reshape(-1).numpy() for vector in vectors]
        for start in range(0, first.numel(), COLUMNS):
            block = np.stack([row[start : start + COLUMNS] for row in flat]).astype(np.float64)
            product += block @ block.T
    return product


def minimum_norm_weights(gram: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """The weights, float64 [m], of sum 1 in [low, high] that minimise w^T G w for the Gram matrix G = `gram` [m, m].

    By the primal active-set method from w = 1/m; exact except for rounding. G may be singular (equal vectors, or more
    vectors than dimensions). Raise RayflError unless low <= 1/m <= high.
    """
    count = len(gram)
    if not low <= 1 / count <= high:
        raise RayflError(f"1/{count} must lie between the bounds low={low} and high={high}")
    weights = np.full(count, 1 / count)
    free = np.full(count, low < 1 / count < high)
    slack = TOLERANCE * np.abs(gram).max()
    # Each iteration lowers the norm or fixes one more entry; the limit ends cycles caused by rounding.
    for _ in range(100 * count + 100):
        step = _step(gram, weights, free, slack)
        target = weights[free] + step
        outside = np.flatnonzero((target < low) | (target > high))
        if len(outside) and np.abs(step).max() > 1e-15:
            bounds = np.where(step < 0, low, high)
            ratios = (bounds[outside] - weights[free][outside]) / step[outside]
            first = outside[ratios.argmin()]
            entry = np.flatnonzero(free)[first]
            weights[free] += max(0.0, ratios.min()) * step
            weights[entry] = bounds[first]
            free[entry] = False
            continue
        weights[free] = np.clip(target, low, high)
        released = _released(gram @ weights, weights, free, low, high, slack)
        if not len(released):
            break
        free[released] = True
    return weights


def _step(gram: np.ndarray, weights: np.ndarray, free: np.ndarray, slack: float) -> np.ndarray:
    """The shortest change of the free entries, of sum 0, that minimises the norm while the other entries stay fixed.

    If vectors hardly differ, the norm may fall along a line without a minimum: the change then goes beyond a bound.
    """
    count = int(free.sum())
    if count < 2:
        return np.zeros(count)
    # Imported here, because it takes longer to load than all methods together.
    from scipy.linalg import helmert

    # In the subspace of sum 0, the common part of all vectors does not hide the small curvature of their differences.
    basis = helmert(count)
    curvatures, ways = np.linalg.eigh(basis @ gram[np.ix_(free, free)] @ basis.T)
    slopes = ways.T @ (basis @ (gram @ weights)[free])
    # No entry changes by more than 1, so a curvature below half the slope's tolerance never changes the slope's sign.
    straight = curvatures <= slack / 2
    if np.linalg.norm(slopes[straight]) > slack:
        step = basis.T @ -(ways[:, straight] @ slopes[straight])
        return 2 * step / np.abs(step).max()
    step = basis.T @ -(ways[:, ~straight] @ (slopes[~straight] / curvatures[~straight]))
    return step - step.mean()


def _released(
    gradient: np.ndarray, weights: np.ndarray, free: np.ndarray, low: float, high: float, slack: float
) -> np.ndarray:
    """Entries at a bound that must leave it so that the norm can fall; none at the optimum.

    Weight moves from entries with a large gradient, unless they are at `low`, to those with a small one, unless they
    are at `high`.
    """
    if low == high:
        return np.array([], dtype=np.int64)
    give = np.where(~free & (weights <= low), -np.inf, gradient)
    take = np.where(~free & (weights >= high), np.inf, gradient)
    giver, taker = int(give.argmax()), int(take.argmin())
    if give[giver] - take[taker] <= slack:
        return np.array([], dtype=np.int64)
    return np.array([entry for entry in (giver, taker) if not free[entry]], dtype=np.int64)
