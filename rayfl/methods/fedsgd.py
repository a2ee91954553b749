"""FedSGD: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
section 2: E = 1 and B = infinity.

x <- x - eta sum_i p_i grad f_i(x): one gradient a client and round, at the model that came down, on the whole train
split (batch_size = 0) or on one minibatch. The same as FedAvg with one such step, but that the gradient itself goes up.
A round in which nothing arrives moves nothing.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from rayfl import tree
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.gradients import DistributedGradient, GradientStep
from rayfl.methods.base import Carry, Context, Finished, Metrics
from rayfl.training import Weighting
from rayfl.tree import State


class FedSGDHyper(GradientStep):
    """Hyper-parameters of FedSGD."""

    weighting: Weighting = Field(default="samples", description="weight of a client in the average")


class FedSGD(DistributedGradient):
    """Clients remember nothing (but an uplink's own memory, where it has one). Server: x."""

    Hyper: ClassVar[type[FedSGDHyper]] = FedSGDHyper
    hyper: FedSGDHyper
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    gather: Mapping[str, Gather] = {"gradient": WeightedMean()}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return self.sent(state, {"gradient": carry["gradient"]}, carry, ctx)

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        gradient = received["gradient"].result
        if not gradient:
            return server, {}
        return {"params": tree.add(server["params"], gradient, -self.hyper.rate(ctx.round))}, {}
