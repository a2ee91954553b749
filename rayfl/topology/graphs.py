"""Topologies: the graphs over which peers exchange messages in a round, and their mixing weights.

`rayfl.topology.statistics` measures such graphs: degrees, connectedness, spectral gap.
"""

import math
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.choices.kinds import Choice
from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.topology.graph_file import read_adjacency

Weights = Literal["uniform", "metropolis"]


class Topology(Choice):
    """A graph over peers, drawn from (seed, round). `receives[i, j]` is True where i receives from j; no self-loops."""

    label: ClassVar[str] = "topology"
    package: ClassVar[str] = "rayfl.topology"
    varying: ClassVar[bool] = False
    """Whether rounds have different graphs."""
    weights: Weights = Field(default="uniform", description="mixing weights: uniform or metropolis")

    @abstractmethod
    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        """Boolean adjacency [num_peers, num_peers] of the round."""

    def read(self, num_peers: int) -> "Topology":
        """The same topology with its file read, if it has one. Raise RayflError if the file cannot be read."""
        return self


class Ring(Topology):
    """Peer i exchanges with i - 1 and i + 1."""

    name: ClassVar[str] = "ring"

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        graph = _hops(num_peers, [1])
        return graph | graph.T


class Grid(Topology):
    """A 2-D grid, filled row by row; each peer exchanges with those above, below, left and right of it."""

    name: ClassVar[str] = "grid"
    wraps: ClassVar[bool] = False
    rows: int | None = Field(default=None, ge=1, description="rows of the grid; default: as square as it can be")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _at_least_two(num_peers)
        rows = self.num_rows(num_peers)
        columns = num_peers // rows
        row, column = np.divmod(np.arange(num_peers), columns)
        graph = np.zeros((num_peers, num_peers), dtype=bool)
        for down, right in ((1, 0), (0, 1)):
            below, beside = row + down, column + right
            inside = np.full(num_peers, True) if self.wraps else (below < rows) & (beside < columns)
            other = below % rows * columns + beside % columns
            graph[np.flatnonzero(inside), other[inside]] = True
        graph |= graph.T
        # One row is its own neighbour around the torus.
        np.fill_diagonal(graph, False)
        return graph

    def num_rows(self, num_peers: int) -> int:
        """Rows of a grid of `num_peers`. Raise RayflError if they do not fill a grid."""
        if self.rows is not None:
            if num_peers % self.rows:
                raise RayflError(f"rows={self.rows} does not divide {num_peers} peers; choose a divisor of {num_peers}")
            return self.rows
        rows = next(rows for rows in range(math.isqrt(num_peers), 0, -1) if num_peers % rows == 0)
        if rows == 1:
            raise RayflError(
                f"{num_peers} peers fill no grid of two or more rows; change clients.count, or set rows=1 for a line"
            )
        return rows


class Torus(Grid):
    """The grid whose last row is next to the first, and whose last column is next to the first."""

    name: ClassVar[str] = "torus"
    wraps: ClassVar[bool] = True


class Exponential(Topology):
    """Peer i receives from i + 1, i + 2, i + 4, ... (Ying et al., Exponential Graph is Provably Efficient for
    Decentralized Deep Training, NeurIPS 2021): ceil(log2 n) others, directed; uniform weights keep the mean."""

    name: ClassVar[str] = "exponential"

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        return _hops(num_peers, [2**power for power in range(_powers(num_peers))])


class OnePeerExponential(Topology):
    """In round t peer i receives from i + 2^(t mod ceil(log2 n)) alone (Ying et al., NeurIPS 2021): for n a power of
    two, uniform weights reach the exact mean every log2 n rounds."""

    name: ClassVar[str] = "one-peer-exponential"
    varying: ClassVar[bool] = True

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        return _hops(num_peers, [2 ** (round % _powers(num_peers))])


class FullyConnected(Topology):
    """Everyone exchanges with everyone."""

    name: ClassVar[str] = "fully-connected"

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _at_least_two(num_peers)
        return ~np.eye(num_peers, dtype=bool)


class ErdosRenyi(Topology):
    """Each pair is an edge with probability p, drawn once and again until the graph is connected."""

    name: ClassVar[str] = "erdos-renyi"
    p: float = Field(default=0.5, gt=0, le=1, description="probability of an edge")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _at_least_two(num_peers)
        generator = seeding.generator(seed, purpose="erdos-renyi")
        for _ in range(1000):
            upper = np.triu(generator.random((num_peers, num_peers)) < self.p, 1)
            graph = upper | upper.T
            if connected(graph):
                return graph
        raise RayflError(f"no connected graph of {num_peers} peers in 1000 draws with p={self.p}; use a larger p")


class RandomNeighbours(Topology):
    """Each peer receives from `degree` others, drawn again every round (Dis-PFL's directed, time-varying graph)."""

    name: ClassVar[str] = "random"
    varying: ClassVar[bool] = True
    degree: int = Field(default=10, ge=1, description="number of peers that each peer receives from")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _check_degree(self.degree, num_peers)
        graph = np.zeros((num_peers, num_peers), dtype=bool)
        generator = seeding.generator(seed, round, purpose="random neighbours")
        for peer in range(num_peers):
            others = np.delete(np.arange(num_peers), peer)
            graph[peer, generator.choice(others, self.degree, replace=False)] = True
        return graph


class RandomRegular(Topology):
    """Every round a new symmetric graph in which each peer exchanges with exactly `degree` others.

    Drawn by pairing (Steger and Wormald, Generating Random Regular Graphs Quickly, 1999), which is uniform in the
    limit of many peers. A round's graph need not be connected; uniform weights keep the mean.
    """

    name: ClassVar[str] = "random-regular"
    varying: ClassVar[bool] = True
    degree: int = Field(default=10, ge=1, description="number of peers that each peer exchanges with")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _check_degree(self.degree, num_peers)
        if self.degree * num_peers % 2:
            raise RayflError(
                f"degree={self.degree} is impossible for all {num_peers} peers, because each link has two ends; "
                "make one of the two numbers even"
            )
        generator = seeding.generator(seed, round, purpose="random regular")
        missing = num_peers - 1 - self.degree
        if missing >= self.degree:
            return _paired(num_peers, self.degree, generator)
        # Nearly everyone is linked: pairing seldom ends well, and draws who is not linked instead.
        return ~_paired(num_peers, missing, generator) & ~np.eye(num_peers, dtype=bool)


class FixedGraph(Topology):
    """The graph in a file, the same every round: a matrix of 0 and 1, or a list of edges (see graph_file.py)."""

    name: ClassVar[str] = "file"
    path: str = Field(
        min_length=1,
        examples=["my_graph.csv"],
        description="a .npy file, or text with a matrix or a pair of peers a line",
    )
    directed: bool = Field(default=False, description="whether a pair i j of a list means only that i receives from j")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _at_least_two(num_peers)
        return read_adjacency(Path(self.path), num_peers, self.directed)

    def read(self, num_peers: int) -> Topology:
        return KnownGraph(weights=self.weights, adjacency=self.receives(num_peers, 0, 0))


class KnownGraph(Topology):
    """The graph of a file that was read; no experiment names it."""

    adjacency: np.ndarray

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        return self.adjacency.copy()


def connected(graph: np.ndarray) -> bool:
    """Whether every peer reaches every other peer along the links of a graph [n, n], directed or not."""
    # Here, since it loads for longer than all topologies together.
    from scipy.sparse.csgraph import connected_components

    return connected_components(graph, connection="strong", return_labels=False) == 1


def mixing_weights(graph: np.ndarray, rule: Weights) -> np.ndarray:
    """W [n, n] with rows that sum to 1: uniform over {i} and its neighbours, or Metropolis (symmetric graphs)."""
    size = len(graph)
    if rule == "uniform":
        closed = graph | np.eye(size, dtype=bool)
        return closed / closed.sum(axis=1, keepdims=True)
    if not np.array_equal(graph, graph.T):
        raise RayflError("metropolis weights need a symmetric graph; use uniform weights")
    degree = graph.sum(axis=1)
    weights = np.where(graph, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0)
    return weights + np.diag(1.0 - weights.sum(axis=1))


def link_weights(graph: np.ndarray, rule: Weights) -> np.ndarray:
    """Symmetric weights a_kl [n, n] of the links: 1 if uniform, or Metropolis. Raise RayflError if the graph is
    directed."""
    if not np.array_equal(graph, graph.T):
        raise RayflError(
            "this method needs one weight per pair of clients, and the topology is directed; use a symmetric one, such "
            "as ring"
        )
    weights = graph.astype(np.float64) if rule == "uniform" else mixing_weights(graph, rule)
    np.fill_diagonal(weights, 0.0)
    return weights


def largest_laplacian_eigenvalue(topology: "Topology", num_peers: int, seed: int) -> float:
    """The largest eigenvalue of D - A of a topology's `link_weights`, with D the sums of the rows of A.

    For graphs that vary, the bound 2 max_k sum_l a_kl: the eigenvalue of one round says nothing about the next.
    """
    weights = link_weights(topology.receives(num_peers, seed, 0), topology.weights)
    degrees = weights.sum(axis=1)
    if topology.varying:
        return 2 * float(degrees.max())
    return float(np.linalg.eigvalsh(np.diag(degrees) - weights)[-1])


def _hops(num_peers: int, distances: list[int]) -> np.ndarray:
    """The graph in which every peer receives from the peers at these `distances` further on."""
    _at_least_two(num_peers)
    graph = np.zeros((num_peers, num_peers), dtype=bool)
    peers = np.arange(num_peers)
    for distance in distances:
        graph[peers, (peers + distance) % num_peers] = True
    return graph


def _powers(num_peers: int) -> int:
    """ceil(log2 n): how many powers of two are less than n, at least 1."""
    return max(1, (num_peers - 1).bit_length())


def _paired(num_peers: int, degree: int, generator: np.random.Generator) -> np.ndarray:
    """A symmetric graph with `degree` links at each peer: loose ends are paired at random, impossible pairs again."""
    while True:
        graph = np.zeros((num_peers, num_peers), dtype=bool)
        ends = np.repeat(np.arange(num_peers), degree)
        while ends.size:
            open_to = ~graph & ~np.eye(num_peers, dtype=bool)
            left = np.unique(ends)
            if not open_to[np.ix_(left, left)].any():
                break
            again = []
            for one, other in generator.permutation(ends).reshape(-1, 2).tolist():
                if one == other or graph[one, other]:
                    again += [one, other]
                else:
                    graph[one, other] = graph[other, one] = True
            ends = np.array(again, dtype=np.int64)
        if not ends.size:
            return graph


def _check_degree(degree: int, num_peers: int) -> None:
    if degree >= num_peers:
        raise RayflError(f"degree={degree} is too many neighbours for {num_peers} peers; at most {num_peers - 1} fit")


def _at_least_two(num_peers: int) -> None:
    if num_peers < 2:
        raise RayflError(f"a graph of peers needs at least 2 clients, and there is {num_peers}")
