"""Who exchanges with whom in a round of a peer method, and with which mixing weights."""

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl import seeding
from rayfl.settings import Settings

Weights = Literal["uniform", "metropolis"]


class Topology(Settings):
    """A graph over peers, drawn from (seed, round). `receives[i, j]` is True where i receives from j; no self-loops."""

    name: ClassVar[str]
    weights: Weights = Field(default="uniform", description="mixing weights: uniform or metropolis")

    @abstractmethod
    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        """Boolean adjacency [num_peers, num_peers] of the round."""


class Ring(Topology):
    """Peer i exchanges with i - 1 and i + 1."""

    name: ClassVar[str] = "ring"

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        _at_least_two(num_peers)
        graph = np.zeros((num_peers, num_peers), dtype=bool)
        peers = np.arange(num_peers)
        graph[peers, (peers + 1) % num_peers] = graph[peers, (peers - 1) % num_peers] = True
        return graph


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
        raise ValueError(f"no connected graph of {num_peers} peers in 1000 draws with p={self.p}; use a larger p")


class RandomNeighbours(Topology):
    """Every round each peer receives from `degree` other peers, drawn anew (Dis-PFL's directed, time-varying graph)."""

    name: ClassVar[str] = "random"
    degree: int = Field(default=10, ge=1, description="number of peers that each peer receives from")

    def receives(self, num_peers: int, seed: int, round: int) -> np.ndarray:
        if self.degree >= num_peers:
            raise ValueError(
                f"degree={self.degree} is too many neighbours for {num_peers} peers; at most {num_peers - 1} fit"
            )
        graph = np.zeros((num_peers, num_peers), dtype=bool)
        generator = seeding.generator(seed, round, purpose="random neighbours")
        for peer in range(num_peers):
            others = np.delete(np.arange(num_peers), peer)
            graph[peer, generator.choice(others, self.degree, replace=False)] = True
        return graph


def connected(graph: np.ndarray) -> bool:
    """Whether every peer is reached from peer 0 in a symmetric graph [n, n]."""
    reached = np.zeros(len(graph), dtype=bool)
    frontier = np.array([0])
    while frontier.size:
        reached[frontier] = True
        frontier = np.flatnonzero(graph[frontier].any(axis=0) & ~reached)
    return bool(reached.all())


def mixing_weights(graph: np.ndarray, rule: Weights) -> np.ndarray:
    """W [n, n] with rows that sum to 1: uniform over {i} and its neighbours, or Metropolis (symmetric graphs)."""
    size = len(graph)
    if rule == "uniform":
        closed = graph | np.eye(size, dtype=bool)
        return closed / closed.sum(axis=1, keepdims=True)
    if not np.array_equal(graph, graph.T):
        raise ValueError("metropolis weights need a symmetric graph; use uniform weights")
    degree = graph.sum(axis=1)
    weights = np.where(graph, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0)
    return weights + np.diag(1.0 - weights.sum(axis=1))


def _at_least_two(num_peers: int) -> None:
    if num_peers < 2:
        raise ValueError(f"a graph of peers needs at least 2 clients, and there is {num_peers}")
