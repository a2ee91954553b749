"""The graphs of a file, one for each round."""

from pathlib import Path

import numpy as np
from pydantic import Field

from rayfl.topology.graph_file import read_rounds
from rayfl.topology.graphs import SparseTopology, Topology, graph_of
from rayfl.topology.mixing import Sparse


class GraphsByRound(SparseTopology):
    """The graphs of a file, one for each round; after the last one the first comes again (see graph_file.py)."""

    name = "file-by-round"
    varying = True
    path: str = Field(
        min_length=1,
        examples=["my_graphs.csv"],
        description="a .npy file with a matrix per round, or text with a round and two peers per line",
    )
    directed: bool = Field(default=False, description="whether a line t i j means only that i receives from j")

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return self.read(num_peers).sparse(num_peers, seed, round_number)

    def read(self, num_peers: int) -> Topology:
        rounds = read_rounds(Path(self.path), num_peers, self.directed)
        return KnownRounds(rounds=rounds, weights=self.weights, epsilon=self.epsilon)


class KnownRounds(SparseTopology):
    """The graphs of a file that was read, as `read_rounds` returns them; no experiment names it."""

    varying = True
    rounds: list[np.ndarray]

    def sparse(self, num_peers: int, seed: int, round_number: int) -> Sparse:
        return graph_of(num_peers, *self.rounds[round_number % len(self.rounds)].T)
