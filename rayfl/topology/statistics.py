"""Statistics of a graph over peers: degrees, connectedness, and the spectral gap of its mixing matrix.

The spectral gap of W is 1 - |l|, with l its eigenvalue of second largest magnitude. Averaging with a symmetric W
shrinks a disagreement between peers to at most |l| of itself a round, and to just that in the worst case; with a gap
of 0 some never agree, with a gap of 1 all agree at once. For directed graphs it is the rate in the long run.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import scipy

from rayfl.topology.graphs import connected
from rayfl.topology.mixing import MOST_PEERS, Sparse, without_diagonal


def spectral_gap(weights: np.ndarray | Sparse) -> float:
    """1 - |l| with l the eigenvalue of second largest magnitude of a mixing matrix [n, n] whose rows sum to 1.

    In [0, 1]; 1 for a single peer.
    """
    weights = weights if isinstance(weights, np.ndarray) else weights.toarray()
    symmetric = np.array_equal(weights, weights.T)
    values = np.abs(np.linalg.eigvalsh(weights) if symmetric else np.linalg.eigvals(weights))
    second = np.sort(values)[-2] if len(values) > 1 else 0.0
    return float(np.clip(1.0 - second, 0.0, 1.0))


def round_metrics(weights: Sparse, present: np.ndarray) -> dict[str, float]:
    """Metrics of a round's exchange among the peers that are present (boolean [n]); {} for fewer than two.

    weights: mixing weights, positive on every link. `graph/mean_degree`, `graph/max_degree` (peers that one receives
    from), `graph/connected` (1 or 0), and `graph/spectral_gap` of the weights, for at most MOST_PEERS peers.
    """
    if np.count_nonzero(present) < 2:
        return {}
    weights = weights[present][:, present]
    # What takes hardly any time is not worth its key's memory.
    measure = _metrics if weights.shape[0] <= MOST_PEERS else _metrics.__wrapped__
    return dict(
        measure(
            *(part.astype(np.int64).tobytes() for part in (weights.indptr, weights.indices)), weights.data.tobytes()
        )
    )


# Keyed by bytes, because arrays cannot be keys: a graph that stays the same is measured once.
@lru_cache(maxsize=4)
def _metrics(starts: bytes, senders: bytes, numbers: bytes) -> Mapping[str, float]:
    rows, columns = np.frombuffer(starts, np.int64), np.frombuffer(senders, np.int64)
    size = len(starts) // 8 - 1
    weights = scipy.sparse.csr_array((np.frombuffer(numbers), columns, rows), shape=(size, size))
    graph = without_diagonal(weights)
    degrees = np.diff(graph.indptr)
    metrics = {
        "graph/mean_degree": float(degrees.mean()),
        "graph/max_degree": float(degrees.max()),
        "graph/connected": float(connected(graph)),
    }
    if size <= MOST_PEERS:
        # The last digits depend on how many threads the eigenvalues are computed with.
        metrics["graph/spectral_gap"] = round(spectral_gap(weights), 9)
    return metrics
