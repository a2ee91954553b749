"""Topologies that are made of another graph: its spanning tree."""

from typing import Annotated, Self

import numpy as np
import scipy
from pydantic import Field

from rayfl.choices.kinds import TO_TABLE, from_table
from rayfl.errors import RayflError
from rayfl.topology.graphs import Ring, Topology, connected, graph_of
from rayfl.topology.mixing import Sparse, is_symmetric


class OfAnother(Topology):
    """A topology made of another one, `base`, whose links go both ways, connect all peers, and do not change."""

    base: Annotated[Topology, from_table(Topology), TO_TABLE] = Field(
        default=Ring(), description="the other graph, by name or table; its mixing weights are not used"
    )

    def receives(self, num_peers: int, seed: int, round_number: int) -> np.ndarray:
        return self.sparse(num_peers, seed, round_number).toarray()

    def read(self, num_peers: int) -> Self:
        return self.model_copy(update={"base": self.base.read(num_peers)})

    def base_graph(self, num_peers: int, seed: int) -> Sparse:
        """The other graph, boolean [num_peers, num_peers]. Raise RayflError if it does not fit."""
        graph = self.base.sparse(num_peers, seed, 0)
        why = "changes from round to round" if self.base.varying else ""
        if not why and not is_symmetric(graph):
            why = "has links that go one way"
        if not why and not connected(graph):
            why = "is in several parts"
        if why:
            raise RayflError(f"={getattr(self.base, 'name', 'file')!r} {why}; take another graph", ("topology", "base"))
        return graph


class SpanningTree(OfAnother):
    """The tree that a breadth-first search finds in another graph, from peer 0 and to the lowest number first."""

    name = "spanning-tree"

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        graph = self.base_graph(num_peers, seed)
        _, before = scipy.sparse.csgraph.breadth_first_order(graph, 0)
        return graph_of(num_peers, np.arange(1, num_peers), before[1:], both_ways=True)
