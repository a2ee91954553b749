"""Peers of your own: a graph with mixing weights of its own.

rayfl run jobs/experiments/demo.toml 'method={name="dpsgd", lr=0.1}' topology=jobs/examples/my_peers.py:Stubborn
"""

import scipy
from pydantic import Field

from rayfl.topology.graphs import Ring
from rayfl.topology.mixing import Exchange, Sparse


class Stubborn(Ring):
    """A ring on which every peer gives its own model the weight `own`, and its neighbours equal parts of the rest."""

    own: float = Field(default=0.8, ge=0, lt=1, description="weight of a peer's own model")

    def mixing(self, graph: Sparse, exchange: Exchange) -> Sparse:
        degrees = graph.sum(axis=1)
        shares = (1 - self.own) / degrees.clip(1)
        links = scipy.sparse.diags_array(shares) @ graph
        # A peer without neighbours, because they are absent, keeps its model.
        kept = scipy.sparse.diags_array(1 - shares * degrees)
        return scipy.sparse.csr_array(links + kept)
