"""Topologies: the graphs over which peers exchange messages in a round, and their mixing weights.

Graphs are sparse arrays [n, n] of scipy without zeros in them; functions take plain arrays of a graph, too. The rules
for mixing weights are in `rayfl.topology.mixing`. `rayfl.topology.statistics` measures such graphs: degrees,
connectedness, spectral gap.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy
from pydantic import Field

from rayfl.choices.kinds import Choice
from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.settings import unused_with
from rayfl.topology.graph_file import read_links, read_weights
from rayfl.topology.mixing import (
    MOST_PEERS,
    TOLERANCE,
    Exchange,
    Sparse,
    Weights,
    is_symmetric,
    mixing_weights,
    without_diagonal,
)
from rayfl.untyped import Foreign


class Topology(Choice):
    """A graph over peers, drawn from (seed, round). `receives[i, j]` is True where i receives from j; no self-loops."""

    label = "topology"
    package = "rayfl.topology"
    varying: ClassVar[bool] = False
    """Whether rounds have different graphs."""
    own_weights: ClassVar[bool] = False
    """Whether `mixing` gives weights of its own, so that the settings `weights` and `epsilon` are refused. True of a
    class that defines `mixing`, unless it says otherwise."""
    weights: Weights = Field(
        default="uniform", description="mixing weights: uniform, metropolis, max-degree, laplacian or column"
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="constant of laplacian weights; default: 2 / (l_2 + l_n) of each graph's Laplacian",
        json_schema_extra=unused_with(weights=["uniform", "metropolis", "max-degree", "column"]),
    )

    def __init_subclass__(cls, **arguments: Foreign) -> None:
        super().__init_subclass__(**arguments)
        if "mixing" in vars(cls) and "own_weights" not in vars(cls):
            cls.own_weights = True

    @abstractmethod
    def receives(self, num_peers: int, seed: int, round_number: int) -> np.ndarray:
        """Boolean adjacency [num_peers, num_peers] of the round."""

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        """The same as a sparse array."""
        return scipy.sparse.csr_array(self.receives(num_peers, seed, round_number))

    def mixing(self, graph: Sparse, exchange: Exchange) -> Sparse:
        """W [num_peers, num_peers] of a graph among the peers that are present, sparse or a plain array: W[i, j] is the
        weight that i gives to what j sent. Only links of the graph and the diagonal may have one."""
        return mixing_weights(graph, self.weights, self.epsilon)

    def read(self, num_peers: int) -> "Topology":
        """The same topology with its file read, if it has one. Raise RayflError if the file cannot be read."""
        return self


class SparseTopology(Topology):
    """A topology that draws its links one by one, so that its memory grows with the links."""

    def receives(self, num_peers: int, seed: int, round_number: int) -> np.ndarray:
        return self.sparse(num_peers, seed, round_number).toarray()

    @abstractmethod
    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse: ...


class Ring(SparseTopology):
    """Peer i exchanges with i - 1 and i + 1."""

    name = "ring"

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return _hops(num_peers, [1, -1])


class Grid(SparseTopology):
    """A 2-D grid, filled row by row; each peer exchanges with those above, below, left and right of it."""

    name = "grid"
    wraps: ClassVar[bool] = False
    rows: int | None = Field(default=None, ge=1, description="rows of the grid; default: those of the squarest grid")

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        rows = self.num_rows(num_peers)
        columns = num_peers // rows
        row, column = np.divmod(np.arange(num_peers), columns)
        links = []
        for down, right in ((1, 0), (0, 1)):
            below, beside = row + down, column + right
            inside = np.full(num_peers, True) if self.wraps else (below < rows) & (beside < columns)
            other = below % rows * columns + beside % columns
            links.append((np.flatnonzero(inside), other[inside]))
        # One row is its own neighbour around the torus.
        return graph_of(num_peers, *np.concatenate(links, axis=1), both_ways=True)

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

    name = "torus"
    wraps = True


class Exponential(SparseTopology):
    """Peer i receives from i + 1, i + 2, i + 4, ... (Ying et al., Exponential Graph is Provably Efficient for
    Decentralized Deep Training, NeurIPS 2021): ceil(log2 n) others, directed; uniform weights keep the mean."""

    name = "exponential"

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return _hops(num_peers, [2**power for power in range(_powers(num_peers))])


class OnePeerExponential(SparseTopology):
    """In round t peer i receives from i + 2^(t mod ceil(log2 n)) alone (Ying et al., NeurIPS 2021): for n a power of
    two, uniform weights reach the exact mean every log2 n rounds."""

    name = "one-peer-exponential"
    varying = True

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return _hops(num_peers, [2 ** (round_number % _powers(num_peers))])


class FullyConnected(Topology):
    """All peers exchange with all others."""

    name = "fully-connected"

    def receives(self, num_peers: int, seed: int, round_number: int) -> np.ndarray:
        return ~np.eye(num_peers, dtype=bool)


class ErdosRenyi(SparseTopology):
    """Each pair is an edge with probability p. The graph is drawn until it is connected, and is the same in all rounds.

    Raise RayflError if 1,000 draws give no connected graph.
    """

    name = "erdos-renyi"
    p: float = Field(default=0.5, gt=0, le=1, description="probability of an edge")

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        generator = seeding.generator(seed, purpose="erdos-renyi")
        for _ in range(1000):
            # A number for each pair, of which those above the diagonal count.
            rows = [np.flatnonzero(generator.random(num_peers) < self.p) for _ in range(num_peers)]
            receivers, senders = np.repeat(np.arange(num_peers), [len(row) for row in rows]), np.concatenate(rows)
            graph = graph_of(num_peers, receivers[receivers < senders], senders[receivers < senders], both_ways=True)
            if connected(graph):
                return graph
        raise RayflError(f"no connected graph of {num_peers} peers in 1000 draws with p={self.p}; use a larger p")


class RandomNeighbours(SparseTopology):
    """Each peer receives from `degree` others, drawn again every round (Dis-PFL's directed, time-varying graph)."""

    name = "random"
    varying = True
    degree: int = Field(default=10, ge=1, description="number of peers that each peer receives from")

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        _check_degree(self.degree, num_peers)
        generator = seeding.generator(seed, round_number, purpose="random neighbours")
        others = np.concatenate([generator.choice(num_peers - 1, self.degree, replace=False) for _ in range(num_peers)])
        peers = np.repeat(np.arange(num_peers), self.degree)
        # Nobody draws itself.
        return graph_of(num_peers, peers, others + (others >= peers))


class RandomRegular(RandomNeighbours):
    """Every round a new symmetric graph in which each peer exchanges with exactly `degree` others.

    Drawn by pairing (Steger and Wormald, Generating Random Regular Graphs Quickly, 1999), which is uniform in the
    limit of many peers. A round's graph need not be connected; uniform weights keep the mean.
    """

    name = "random-regular"

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        _check_degree(self.degree, num_peers)
        if self.degree * num_peers % 2:
            raise RayflError(
                f"degree={self.degree} is impossible for all {num_peers} peers, because each link has two ends; "
                "make one of the two numbers even"
            )
        generator = seeding.generator(seed, round_number, purpose="random regular")
        missing = num_peers - 1 - self.degree
        if missing >= self.degree:
            return _paired(num_peers, self.degree, generator)
        # Nearly everyone is linked: pairing seldom ends well, and draws who is not linked instead.
        receivers, senders = np.nonzero(~_paired(num_peers, missing, generator).toarray())
        return graph_of(num_peers, receivers, senders)


class FixedGraph(SparseTopology):
    """The graph in a file, the same every round: a matrix, or a list of edges (see graph_file.py)."""

    name = "file"
    own_weights = False
    path: str = Field(
        min_length=1,
        examples=["my_graph.csv"],
        description="a .npy, .graphml or .gml file, or text with a matrix or one pair of peers per line",
    )
    directed: bool = Field(default=False, description="whether a pair i j of a list means only that i receives from j")
    weighted: bool = Field(
        default=False,
        description="whether the file has mixing weights: in the matrix, or as a third number a line",
    )

    def unused(self) -> Mapping[str, str]:
        other = dict.fromkeys(("weights", "epsilon"), "beside weighted=true") if self.weighted else {}
        return {**super().unused(), **other}

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return self.read(num_peers).sparse(num_peers, seed, round_number)

    def mixing(self, graph: Sparse, exchange: Exchange) -> Sparse:
        return self.read(graph.shape[0]).mixing(graph, exchange)

    def read(self, num_peers: int) -> Topology:
        path = Path(self.path)
        if not self.weighted:
            rule = {"weights": self.weights, "epsilon": self.epsilon}
            return KnownGraph(links=read_links(path, num_peers, self.directed), **rule)
        links, values = read_weights(path, num_peers, self.directed)
        return KnownWeights(links=links, values=values)


class KnownGraph(SparseTopology):
    """The graph of a file that was read, as `read_links` returns it; no experiment names it."""

    links: np.ndarray

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return graph_of(num_peers, *self.links.T)


class KnownWeights(KnownGraph):
    """The graph and the weights of a file that was read, as `read_weights` returns them; no experiment names it."""

    values: np.ndarray

    def mixing(self, graph: Sparse, exchange: Exchange) -> Sparse:
        """The weights of links from and to absent peers go to the receivers themselves; if only the columns of the
        file's matrix sum to 1, to the senders."""
        whole = scipy.sparse.csr_array((self.values, (*self.links.T,)), shape=graph.shape)
        links = without_diagonal(whole)
        kept = links.multiply(graph).tocsr()
        by_sender = abs(whole.sum(axis=1) - 1).max() > TOLERANCE >= abs(whole.sum(axis=0) - 1).max()
        lost = links.sum(axis=int(not by_sender)) - kept.sum(axis=int(not by_sender))
        weights = scipy.sparse.csr_array(kept + scipy.sparse.diags_array(whole.diagonal() + lost))
        weights.eliminate_zeros()
        return weights


def graph_of(num_peers: int, receivers: np.ndarray, senders: np.ndarray, both_ways: bool = False) -> Sparse:
    """The graph of these links, boolean [num_peers, num_peers]; a link from a peer to itself is left out.

    both_ways: whether the senders receive, too.
    """
    if both_ways:
        receivers, senders = np.concatenate([receivers, senders]), np.concatenate([senders, receivers])
    links = np.stack([receivers, senders])[:, receivers != senders]
    return scipy.sparse.csr_array((np.ones(links.shape[1], dtype=bool), (*links,)), shape=(num_peers, num_peers))


def connected(graph: np.ndarray | Sparse) -> bool:
    """Whether every peer reaches every other peer along the links of a graph [n, n], directed or not."""
    return scipy.sparse.csgraph.connected_components(graph, connection="strong", return_labels=False) == 1


def link_weights(topology: Topology, graph: Sparse, exchange: Exchange) -> Sparse:
    """Symmetric weights a_kl [n, n] of a graph's links: 1 if uniform, else the mixing weights. Raise RayflError if they
    are not the same in both directions."""
    is_uniform = topology.weights == "uniform" and not topology.own_weights
    if is_symmetric(graph):
        weights = graph.astype(np.float64) if is_uniform else without_diagonal(topology.mixing(graph, exchange))
        if is_symmetric(weights):
            return weights
    raise RayflError(
        "this method needs one weight per pair of clients, and the topology is directed; use a symmetric one, such as "
        "ring"
    )


def largest_laplacian_eigenvalue(topology: Topology, num_peers: int, seed: int) -> float:
    """The largest eigenvalue of D - A of a topology's `link_weights`, with D the sums of the rows of A.

    For graphs that vary, the bound 2 max_k sum_l a_kl: the eigenvalue of one round says nothing about the next. The
    same bound for more than MOST_PEERS peers.
    """
    everyone = Exchange(seed, 0, np.full(num_peers, True), not topology.varying)
    weights = link_weights(topology, topology.sparse(num_peers, seed, 0), everyone)
    degrees = weights.sum(axis=1)
    if topology.varying or num_peers > MOST_PEERS:
        return 2 * float(degrees.max())
    return float(np.linalg.eigvalsh(np.diag(degrees) - weights.toarray())[-1])


def _hops(num_peers: int, distances: list[int]) -> Sparse:
    """The graph in which every peer receives from the peers at these `distances` further on."""
    peers = np.repeat(np.arange(num_peers), len(distances))
    return graph_of(num_peers, peers, (peers + np.tile(distances, num_peers)) % num_peers)


def _powers(num_peers: int) -> int:
    """ceil(log2 n): how many powers of two are less than n, at least 1."""
    return max(1, (num_peers - 1).bit_length())


def _paired(num_peers: int, degree: int, generator: np.random.Generator) -> Sparse:
    """A symmetric graph with `degree` links at each peer: loose ends are paired at random, impossible pairs again."""
    while True:
        links: set[tuple[int, int]] = set()
        ends = np.repeat(np.arange(num_peers), degree)
        while ends.size:
            if all(link in links for link in itertools.combinations(np.unique(ends).tolist(), 2)):
                break
            again = []
            for first, second in generator.permutation(ends).reshape(-1, 2).tolist():
                link = (min(first, second), max(first, second))
                if first == second or link in links:
                    again += [first, second]
                else:
                    links.add(link)
            ends = np.array(again, dtype=np.int64)
        if not ends.size:
            return graph_of(num_peers, *np.array([*links], dtype=np.int64).reshape(-1, 2).T, both_ways=True)


def _check_degree(degree: int, num_peers: int) -> None:
    if degree >= num_peers:
        raise RayflError(f"degree={degree} is too many neighbours for {num_peers} peers; at most {num_peers - 1} fit")
