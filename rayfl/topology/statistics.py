"""Statistics of a graph over peers: degrees, connectedness, and the spectral gap of its mixing matrix.

The spectral gap of W is 1 - |l|, with l its eigenvalue of second largest magnitude. Averaging with a symmetric W
shrinks a disagreement between peers to at most |l| of itself a round, and to just that in the worst case; with a gap
of 0 some never agree, with a gap of 1 all agree at once. For directed graphs it is the rate in the long run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add

import numpy as np

from rayfl.topology.graphs import MOST_PEERS, Sparse, Topology, connected, mixing_weights, without_diagonal

MOST_ROUNDS = 64
"""The most rounds of a time-varying graph that are measured."""


@dataclass(frozen=True)
class Facts:
    """Statistics of a topology over `num_rounds` graphs: one if it is fixed, the first ones if it varies.

    `degrees`: smallest, mean and largest number of peers that a peer receives from in a round; `most_listeners`: the
    largest number that receive from one; `connected`: of the union of the graphs; `every_round`: of each of them;
    `spectral_gap`: of the mean of their mixing matrices.
    """

    num_peers: int
    num_rounds: int
    degrees: tuple[int, float, int]
    most_listeners: int
    connected: bool
    every_round: bool
    spectral_gap: float

    @property
    def sentence(self) -> str:
        """The statistics in words."""
        low, mean, high = self.degrees
        others = "other" if high == 1 else "others"
        heard = f"{low} {others}" if low == high else f"{low} to {high} {others} (mean {mean:.3g})"
        start = f"Each of the {self.num_peers} peers receives from {heard} and sends to at most {self.most_listeners}"
        joined = "connected" if self.connected else "not connected: some peers never receive anything from others"
        if self.num_rounds == 1:
            return f"{start}. The graph is {joined}; the spectral gap of its mixing matrix is {self.spectral_gap:.4g}."
        single = "each of them is" if self.every_round else "not each of them is"
        return (
            f"{start} in a round. The graphs of the first {self.num_rounds} rounds, taken together, are {joined}; "
            f"{single} connected by itself. The spectral gap of the mean of their mixing matrices is "
            f"{self.spectral_gap:.4g}."
        )


def facts(topology: Topology, num_peers: int, seed: int, rounds: int) -> Facts:
    """The statistics of a topology with all peers present. Raise RayflError if the graph is impossible."""
    looked_at = min(rounds, MOST_ROUNDS) if topology.varying else 1
    graphs = [topology.sparse(num_peers, seed, round) for round in range(looked_at)]
    degrees = np.stack([graph.sum(axis=1) for graph in graphs])
    mean = reduce(add, (mixing_weights(graph, topology.weights) for graph in graphs)) / looked_at
    return Facts(
        num_peers=num_peers,
        num_rounds=looked_at,
        degrees=(int(degrees.min()), float(degrees.mean()), int(degrees.max())),
        most_listeners=max(int(graph.sum(axis=0).max()) for graph in graphs),
        connected=connected(reduce(add, graphs)),
        every_round=all(connected(graph) for graph in graphs),
        spectral_gap=spectral_gap(mean),
    )


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
    return dict(
        _metrics(
            *(part.astype(np.int64).tobytes() for part in (weights.indptr, weights.indices)), weights.data.tobytes()
        )
    )


# Keyed by bytes, because arrays cannot be keys: a graph that stays the same is measured once.
@lru_cache(maxsize=4)
def _metrics(starts: bytes, senders: bytes, numbers: bytes) -> Mapping[str, float]:
    from scipy.sparse import csr_array

    rows, size = np.frombuffer(starts, np.int64), len(starts) // 8 - 1
    weights = csr_array((np.frombuffer(numbers), np.frombuffer(senders, np.int64), rows), shape=(size, size))
    graph = without_diagonal(weights)
    degrees = np.diff(graph.indptr)
    found = {
        "graph/mean_degree": float(degrees.mean()),
        "graph/max_degree": float(degrees.max()),
        "graph/connected": float(connected(graph)),
    }
    if size <= MOST_PEERS:
        # The last digits depend on how many threads the eigenvalues are computed with.
        found["graph/spectral_gap"] = round(spectral_gap(weights), 9)
    return found
