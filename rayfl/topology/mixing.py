"""Mixing weights W [n, n] of a graph: the rules that a topology names, and the check that they fit a method.

W[i, j] is the weight that peer i gives to what peer j sent. Weights are sparse arrays of scipy without zeros in them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import scipy

from rayfl.errors import RayflError
from rayfl.untyped import Foreign

Sparse = Foreign
"""A `scipy.sparse.csr_array`. scipy loads the part with them at its first use: it takes longer than all topologies."""
Weights = Literal["uniform", "metropolis", "max-degree", "laplacian", "column"]
Needs = Literal["row", "column", "symmetric", "doubly"]
"""What a method needs of W: that rows sum to 1; that columns do, and no weight is negative; that it is symmetric and
rows sum to 1; that rows and columns sum to 1."""

FITTING: dict[Needs, Weights] = {
    "row": "uniform",
    "column": "column",
    "symmetric": "metropolis",
    "doubly": "metropolis",
}
"""The rule that gives a method what it needs on every graph whose links go both ways, whoever is absent."""
MOST_PEERS = 1000
"""Above this number of peers no eigenvalues are computed, because the time grows with its cube."""
TOLERANCE = 1e-9
"""The largest error of a sum of weights, and of their symmetry."""

_CURES: dict[Needs, str] = {
    "row": "give weights whose rows sum to 1",
    "column": "take weights='column'",
    "symmetric": "take weights='metropolis' and a graph such as ring, whose links go both ways",
    "doubly": "take weights='metropolis' and a graph whose links go both ways, or uniform weights where every peer "
    "sends and receives equally often, as on the exponential graph",
}


@dataclass(frozen=True)
class Exchange:
    """What the weights of an exchange may depend on, besides its graph.

    `present`: the peers that exchange, booleans [n]. `steady`: whether all rounds have the same graph, with all peers.
    """

    seed: int
    round: int
    present: np.ndarray
    steady: bool


def mixing_weights(graph: Sparse, rule: Weights, epsilon: float | None = None) -> Sparse:
    """W [n, n] of a graph [n, n], sparse or a plain array, by one of the rules.

    The diagonal has what the others leave of the row, or of the column. For links i, j:

    - uniform: 1 / (1 + number of peers that i hears), in rows.
    - column: 1 / (1 + number of peers that hear j), in columns.
    - metropolis: 1 / (1 + max(d_i, d_j)) with degrees d (Xiao, Boyd, Lall, IPSN 2005).
    - max-degree: 1 / (1 + the largest degree).
    - laplacian: `epsilon`; by default 2 / (l_2 + l_n) of the Laplacian's smallest positive and largest eigenvalue,
      which agrees fastest among all constants (Xiao, Boyd, Systems and Control Letters 2004).

    The last three need a symmetric graph; their W is symmetric, too. Raise RayflError otherwise.
    """
    graph = scipy.sparse.csr_array(graph)
    size = graph.shape[0]
    if rule == "uniform":
        weights = (graph + scipy.sparse.eye_array(size, dtype=bool, format="csr")).astype(np.float64)
        sizes = np.diff(weights.indptr)
        weights.data = np.repeat(1.0 / sizes, sizes)
        return weights
    if rule == "column":
        return mixing_weights(graph.T, "uniform").T.tocsr()
    if not is_symmetric(graph):
        raise RayflError(f"{rule} weights need a symmetric graph; use uniform weights")
    degree = np.diff(graph.indptr)
    links = graph.tocoo()
    if rule == "metropolis":
        shares = 1.0 / (1.0 + np.maximum(degree[links.row], degree[links.col]))
    else:
        constant = 1.0 / (1.0 + degree.max()) if rule == "max-degree" else _constant(graph, epsilon)
        shares = np.full(links.nnz, constant)
    weights = scipy.sparse.csr_array((shares, (links.row, links.col)), shape=graph.shape)
    # Added up as in a plain array, some rows at a time: their zeros decide the order of the additions.
    starts = range(0, size, step := max(1, 10**6 // size))
    sums = np.concatenate([weights[start : start + step].toarray().sum(axis=1) for start in starts])
    return scipy.sparse.csr_array(weights + scipy.sparse.diags_array(1.0 - sums))


def _constant(graph: Sparse, epsilon: float | None) -> float:
    """The constant of laplacian weights. Raise RayflError if some disagreement would not shrink under `epsilon`."""
    size, most = graph.shape[0], 2.0 * np.diff(graph.indptr).max()
    if size <= MOST_PEERS:
        smallest, most = _laplacian_eigenvalues(size, *(ends.astype(np.int64).tobytes() for ends in graph.nonzero()))
    elif epsilon is None:
        raise RayflError(
            f"laplacian weights of more than {MOST_PEERS} peers have no default constant; give topology.epsilon"
        )
    if epsilon is None:
        return 2.0 / (smallest + most) if most else 0.0
    if epsilon * most >= 2 - TOLERANCE:
        raise RayflError(
            f"={epsilon:g} times {most:.4g}, the largest eigenvalue of the graph's Laplacian (or a bound on it), must "
            f"be below 2; set it below {2 / most:.4g}",
            ("topology", "epsilon"),
        )
    return epsilon


# Keyed by bytes, because arrays cannot be keys: a graph that stays the same is measured once.
@lru_cache(maxsize=4)
def _laplacian_eigenvalues(size: int, receivers: bytes, senders: bytes) -> tuple[float, float]:
    """The smallest positive eigenvalue of D - A and the largest; 0 and 0 without links."""
    laplacian = np.zeros((size, size))
    laplacian[np.frombuffer(receivers, np.int64), np.frombuffer(senders, np.int64)] = -1.0
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    values = np.linalg.eigvalsh(laplacian)
    positive = values[values > TOLERANCE]
    # The last digits depend on how many threads the eigenvalues are computed with.
    return (round(float(positive[0]), 12), round(float(positive[-1]), 12)) if positive.size else (0.0, 0.0)


def least_eigenvalue(weights: Sparse) -> float:
    """The least eigenvalue of a symmetric mixing matrix [n, n]. The time grows with n cubed."""
    ends = (end.astype(np.int64).tobytes() for end in weights.nonzero())
    return _least_eigenvalue(weights.shape[0], *ends, weights.tocsr().data.tobytes())


@lru_cache(maxsize=4)
def _least_eigenvalue(size: int, receivers: bytes, senders: bytes, numbers: bytes) -> float:
    dense = np.zeros((size, size))
    dense[np.frombuffer(receivers, np.int64), np.frombuffer(senders, np.int64)] = np.frombuffer(numbers)
    return float(np.linalg.eigvalsh(dense)[0])


def check_weights(weights: Sparse, graph: Sparse, needs: Needs, may_be_negative: bool = True) -> None:
    """Raise RayflError, with the row or column, if mixing weights of a graph do not give a method what it needs.

    may_be_negative: whether the method takes negative weights.
    """
    if tuple(weights.shape) != tuple(graph.shape):
        raise RayflError(f"mixing weights have the shape {tuple(weights.shape)}, not {tuple(graph.shape)}")
    finite = bool(np.isfinite(weights.data).all())
    if not finite or ((needs == "column" or not may_be_negative) and weights.data.min(initial=0.0) < 0):
        bad = np.flatnonzero(~np.isfinite(weights.data) | (weights.data < 0))[0]
        receiver = int(np.searchsorted(weights.indptr, bad, side="right")) - 1
        raise RayflError(
            f"the mixing weights have {weights.data[bad]:g} in row {receiver}, and none may be "
            f"{'negative; take other weights' if finite else 'infinite or NaN'}"
        )
    links = without_diagonal(weights)
    outside = (links - links.multiply(graph)).tocoo()
    if outside.nnz:
        receiver, sender = outside.row[0], outside.col[0]
        raise RayflError(f"the mixing weights have row {receiver}, column {sender}, and the graph has no such link")
    for word, axis, kinds in (("row", 1, ("row", "symmetric", "doubly")), ("column", 0, ("column", "doubly"))):
        sums = np.asarray(weights.sum(axis=axis))
        if needs in kinds and (off := np.flatnonzero(np.abs(sums - 1) > TOLERANCE)).size:
            raise RayflError(
                f"every {word} of the mixing weights must sum to 1, and {word} {off[0]} sums to {sums[off[0]]:.6g}; "
                f"{_CURES[needs]}"
            )
    if needs == "symmetric":
        apart = abs(weights - weights.T).tocoo()
        if (off := np.flatnonzero(apart.data > TOLERANCE)).size:
            row, column = apart.row[off[0]], apart.col[off[0]]
            raise RayflError(
                f"the mixing matrix must be symmetric, and has {weights[row, column]:.6g} in row {row}, column "
                f"{column}, but {weights[column, row]:.6g} in row {column}, column {row}; {_CURES[needs]}"
            )


def without_diagonal(weights: Sparse) -> Sparse:
    """The weights of the links alone."""
    return scipy.sparse.csr_array(weights - scipy.sparse.diags_array(weights.diagonal()))


def is_symmetric(graph: Sparse) -> bool:
    """Whether a graph's links, or weights, are the same in both directions."""
    return not (graph != graph.T).nnz
