"""Random graphs: Epidemic Learning's, and two of networkx that stay the same in all rounds."""

from abc import abstractmethod

import numpy as np
from pydantic import Field

from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.topology.graphs import SparseTopology, connected, graph_of
from rayfl.topology.mixing import Sparse
from rayfl.untyped import Foreign

TRIES = 100
"""How often a graph is drawn before it is given up as never connected."""


class Epidemic(SparseTopology):
    """Each round every peer sends to `degree` others, drawn again, and averages all that it receives (Epidemic
    Learning, the local form: de Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma, NeurIPS 2023).

    The number of messages that a peer receives varies and may be 0. `random-regular` is the oracle form, in which all
    receive equally many. A message that is drawn for an absent peer is not sent.
    """

    name = "epidemic"
    varying = True
    degree: int | None = Field(
        default=None, ge=1, description="number of peers that each peer sends to, s; default: ceil(log2 n)"
    )

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        degree = self.degree or max(1, (num_peers - 1).bit_length())
        if degree >= num_peers:
            raise RayflError(f"degree={degree} is too many for {num_peers} peers; at most {num_peers - 1} fit")
        generator = seeding.generator(seed, round_number, purpose="epidemic")
        others = np.concatenate([generator.choice(num_peers - 1, degree, replace=False) for _ in range(num_peers)])
        senders = np.repeat(np.arange(num_peers), degree)
        # Nobody draws itself.
        return graph_of(num_peers, others + (others >= senders), senders)


class OfNetworkx(SparseTopology):
    """A graph that networkx draws from the experiment's seed, until it is connected; the same in all rounds."""

    @abstractmethod
    def drawn(self, num_peers: int, seed: int) -> Foreign:
        """One draw of the graph, a networkx.Graph with nodes 0 to num_peers - 1."""

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        generator = seeding.generator(seed, purpose=self.name)
        for _ in range(TRIES):
            edges = np.array([*self.drawn(num_peers, int(generator.integers(2**31))).edges], np.int64).reshape(-1, 2)
            graph = graph_of(num_peers, *edges.T, both_ways=True)
            if connected(graph):
                return graph
        raise RayflError(f"no connected graph of {num_peers} peers in {TRIES} draws of {self!r}; raise its numbers")


class SmallWorld(OfNetworkx):
    """A ring in which each peer is linked to its `neighbours` nearest, and each link is moved to a random peer with
    probability `rewired` (Watts, Strogatz, Nature 1998; networkx's watts_strogatz_graph)."""

    name = "small-world"
    neighbours: int = Field(default=4, ge=2, description="links of a peer on the ring before they move; an even number")
    rewired: float = Field(default=0.1, ge=0, le=1, description="probability that a link moves")

    def drawn(self, num_peers: int, seed: int) -> Foreign:
        import networkx

        if self.neighbours % 2 or self.neighbours >= num_peers:
            raise RayflError(
                f"neighbours={self.neighbours} must be even and below the {num_peers} peers, half of them on each side"
            )
        return networkx.watts_strogatz_graph(num_peers, self.neighbours, self.rewired, seed=seed)


class Geometric(OfNetworkx):
    """Peers at random places in the unit square are linked if they are at most `radius` apart (networkx's
    random_geometric_graph)."""

    name = "geometric"
    radius: float | None = Field(
        default=None, gt=0, description="largest distance of neighbours; default: sqrt(2 log(n) / n)"
    )

    def drawn(self, num_peers: int, seed: int) -> Foreign:
        import networkx

        radius = self.radius or float(np.sqrt(2 * np.log(num_peers) / num_peers))
        return networkx.random_geometric_graph(num_peers, radius, seed=seed)
