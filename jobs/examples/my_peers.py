"""Peers of your own: a graph with mixing weights of its own, and a method with a message for each neighbour.

rayfl run jobs/experiments/demo.toml 'method={name="dpsgd", lr=0.1}' topology=jobs/examples/my_peers.py:Stubborn
rayfl run jobs/experiments/demo.toml 'method={name="jobs/examples/my_peers.py:Slices", lr=0.1}' topology=ring
"""

import scipy
import torch
from pydantic import Field

from rayfl.methods.base import Capabilities, Collect, Context, Finished, ModelState, PeerHalf, Received, Upload
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel
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


class Slices(OwnModel, GradientMethod, PeerHalf):
    """Each neighbour gets other tensors of the model, so that a peer sends its model once, to however many listen.

    Which tensors a neighbour gets changes from round to round. A peer averages its own tensors and those that came.
    """

    hyper: LocalWork
    Hyper = LocalWork
    capabilities = Capabilities(include_self=False)
    gather = {"slice": Collect()}

    def finish(self, state: ModelState, carry: LocalCarry, ctx: Context) -> Finished:
        # The message is {}: there is none for all neighbours.
        return Finished({"params": carry["params"]}, {}, 1.0, self.train_loss(carry, ctx))

    def message_to(self, state: ModelState, neighbour: int, ctx: Context) -> Upload:
        place, number = ctx.neighbours_out.index(neighbour) + ctx.round, len(ctx.neighbours_out)
        names = sorted(state["params"])[place % number :: number]
        return {"slice": {name: state["params"][name] for name in names}}

    def mix(self, state: ModelState, received: Received, ctx: Context) -> ModelState:
        slices = received["slice"].items.values() if received else ()
        came = [part for part in slices if isinstance(part, dict)]
        return {
            "params": {
                name: torch.stack([tensor, *(part[name] for part in came if name in part)]).mean(dim=0)
                for name, tensor in state["params"].items()
            }
        }
