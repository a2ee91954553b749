"""Weights of the shortest convex combination of vectors, from their inner products alone.

minimise lambda^T G lambda over sum(lambda) = 1 and low <= lambda_i <= high, with G [m, m] the Gram matrix.
"""

from collections.abc import Sequence

import numpy as np

from rayfl.errors import RayflError
from rayfl.tree import Tree

COLUMNS = 1 << 16
"""Entries of all vectors that are turned to float64 at once."""

TOLERANCE = 1e-13
"""How far a gradient may violate the optimality conditions, as a share of the largest entry of G."""


def gram(vectors: Sequence[Tree]) -> np.ndarray:
    """Inner products over all entries, float64 [m, m]; beside the vectors it takes m * 65,536 * 8 bytes."""
    product = np.zeros((len(vectors), len(vectors)))
    for name, first in vectors[0].items():
        flat = [vector[name].detach().reshape(-1).numpy() for vector in vectors]
        for start in range(0, first.numel(), COLUMNS):
            block = np.stack([row[start : start + COLUMNS] for row in flat]).astype(np.float64)
            product += block @ block.T
    return product


def minimum_norm_weights(gram: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """The minimiser, float64 [m], by the primal active-set method from lambda = 1/m; exact but for rounding.

    `gram` may be singular (vectors that repeat, or more of them than dimensions). Raise RayflError unless
    low <= 1/m <= high.
    """
    count = len(gram)
    if not low <= 1 / count <= high:
        raise RayflError(f"the bounds low={low} and high={high} must have 1/{count} between them")
    weights = np.full(count, 1 / count)
    free = np.full(count, low < 1 / count < high)
    slack = TOLERANCE * np.abs(gram).max()
    # Each round either lowers the norm or blocks one more entry; the limit is for rounding that goes in circles.
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
    """The shortest change of the free entries, of sum 0, that makes the norm smallest while the others stay fixed.

    If vectors hardly differ, the norm may fall along a line without a minimum: the change then leads beyond a bound.
    """
    count = int(free.sum())
    if count < 2:
        return np.zeros(count)
    # Here, since it loads for longer than all methods together.
    from scipy.linalg import helmert

    # Among ways of sum 0, what all vectors share cannot drown the small curvature of their differences.
    basis = helmert(count)
    curvatures, ways = np.linalg.eigh(basis @ gram[np.ix_(free, free)] @ basis.T)
    slopes = ways.T @ (basis @ (gram @ weights)[free])
    # No entry is further than 1 away, so a curvature of less than half the slope's tolerance never turns it.
    straight = curvatures <= slack / 2
    if np.linalg.norm(slopes[straight]) > slack:
        step = basis.T @ -(ways[:, straight] @ slopes[straight])
        return 2 * step / np.abs(step).max()
    step = basis.T @ -(ways[:, ~straight] @ (slopes[~straight] / curvatures[~straight]))
    return step - step.mean()


def _released(
    gradient: np.ndarray, weights: np.ndarray, free: np.ndarray, low: float, high: float, slack: float
) -> np.ndarray:
    """Entries at a bound that must leave it for the norm to fall; none at the optimum.

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
