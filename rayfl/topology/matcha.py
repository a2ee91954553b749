"""MATCHA: Wang, Sahu, Yang, Joshi, Kar, MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling,
arXiv 1905.09435.

The links of a graph are divided into matchings, in which no peer has two links. In each round matching j is active with
probability p_j, by a draw that all peers share, and W = I - alpha (sum of the Laplacians L_j of active matchings).

- p maximises the second smallest eigenvalue of sum_j p_j L_j, with sum_j p_j at most `budget` times the number of
  matchings: so important links are active more often.
- alpha minimises the largest eigenvalue rho of E W'W - J = I - 2 alpha A + alpha^2 (A^2 + 2 B) - J, with
  A = sum_j p_j L_j and B = sum_j p_j (1 - p_j) L_j, as L_j^2 = 2 L_j. Expected squared disagreement shrinks by rho per
  round. The authors' code solves a semidefinite program; a search in the one number alpha has the same minimum.
- The matchings are those of a greedy colouring of the links in their order; the paper leaves them open.
- W is symmetric. A peer with many links may keep a negative weight of its own, which methods refuse that weigh every
  entry by itself. A link with an absent end is inactive.
"""

from functools import lru_cache

import numpy as np
import scipy
from pydantic import Field

from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.topology.graphs import graph_of
from rayfl.topology.mixing import MOST_PEERS, Exchange, Sparse
from rayfl.topology.of_another import OfAnother

STEPS = 2000
"""Steps of the search for the probabilities."""


class Matcha(OfAnother):
    """Random matchings of another graph, with weights that make models agree fastest."""

    name = "matcha"
    varying = True
    own_weights = True
    budget: float = Field(
        default=0.5, gt=0, le=1, description="mean share of matchings that are active in a round, C_b"
    )

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        matchings, probabilities, _ = self.plan(num_peers, seed)
        draws = seeding.generator(seed, round_number, purpose="matcha").random(len(matchings))
        active = [np.array(matching) for matching, p, u in zip(matchings, probabilities, draws, strict=True) if u < p]
        links = np.concatenate([np.empty((0, 2), np.int64), *active])
        return graph_of(num_peers, *links.T, both_ways=True)

    def mixing(self, graph: Sparse, exchange: Exchange) -> Sparse:
        alpha = self.plan(graph.shape[0], exchange.seed)[2]
        kept = scipy.sparse.diags_array(1.0 - alpha * graph.sum(axis=1))
        weights = scipy.sparse.csr_array(alpha * graph.astype(np.float64) + kept)
        weights.eliminate_zeros()
        return weights

    def plan(self, num_peers: int, seed: int) -> "MatchingPlan":
        """The matchings, their probabilities, and alpha."""
        if num_peers > MOST_PEERS:
            raise RayflError(
                f"='matcha' computes eigenvalues, and {num_peers} peers are too many; at most {MOST_PEERS}",
                ("topology",),
            )
        links = np.argwhere(np.triu(self.base_graph(num_peers, seed).toarray()))
        return _plan(num_peers, tuple((first, second) for first, second in links.tolist()), self.budget)


MatchingPlan = tuple[tuple[tuple[tuple[int, int], ...], ...], tuple[float, ...], float]
"""Matchings as links, the probability of each, and alpha."""


@lru_cache(maxsize=4)
def _plan(num_peers: int, links: tuple[tuple[int, int], ...], budget: float) -> MatchingPlan:
    matchings = tuple(map(tuple, colours(links)))
    laplacians = np.array([laplacian(num_peers, matching) for matching in matchings])
    # The last digits depend on how many threads the eigenvalues are computed with.
    p = np.round(activation(laplacians, budget), 9)
    return matchings, tuple(p.tolist()), round(best_alpha(laplacians, p)[0], 12)


def colours(links: tuple[tuple[int, int], ...]) -> list[list[tuple[int, int]]]:
    """The links in matchings: each in the first in which none of its ends has a link."""
    matchings: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for link in links:
        index = next((i for i, peers in enumerate(busy) if peers.isdisjoint(link)), len(busy))
        if index == len(busy):
            matchings.append([])
            busy.append(set())
        matchings[index].append(link)
        busy[index].update(link)
    return matchings


def laplacian(num_peers: int, links: tuple[tuple[int, int], ...]) -> np.ndarray:
    """D - A of these links, float64 [num_peers, num_peers]."""
    matrix = np.zeros((num_peers, num_peers))
    for first, second in links:
        matrix[[first, second], [second, first]] -= 1.0
        matrix[[first, second], [first, second]] += 1.0
    return matrix


def activation(laplacians: np.ndarray, budget: float) -> np.ndarray:
    """p [num_matchings] that maximises the second smallest eigenvalue of sum_j p_j L_j, by projected supergradients."""
    number = len(laplacians)
    p = np.full(number, budget)
    best, value = p, -1.0
    for step in range(STEPS if budget < 1 else 1):
        values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, 1))
        if values[1] > value + 1e-12:
            best, value = p, values[1]
        slope = np.einsum("i,kij,j->k", vectors[:, 1], laplacians, vectors[:, 1])
        p = projected(p + 0.3 / np.sqrt(step + 1.0) * slope / max(1e-12, float(np.abs(slope).max())), budget * number)
    return best


def projected(p: np.ndarray, total: float) -> np.ndarray:
    """The nearest point with entries in [0, 1] and a sum of at most `total`."""
    if np.clip(p, 0, 1).sum() <= total:
        return np.clip(p, 0, 1)
    low, high = p.min() - 1.0, p.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(p - middle, 0, 1).sum() > total else (low, middle)
    return np.clip(p - high, 0, 1)


def best_alpha(laplacians: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """alpha, and rho: the largest eigenvalue of E W'W - J, which is convex in alpha, at its minimum."""
    size = laplacians.shape[1]
    mean, spread = np.tensordot(p, laplacians, 1), np.tensordot(p * (1 - p), laplacians, 1)
    second, rest = mean @ mean + 2 * spread, np.eye(size) - 1.0 / size

    def rho(alpha: float) -> float:
        return float(np.linalg.eigvalsh(rest - 2 * alpha * mean + alpha**2 * second)[-1])

    low, high, golden = 0.0, 1.0, (np.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if rho(left) <= rho(right) else (left, high)
    return (low + high) / 2, rho((low + high) / 2)
