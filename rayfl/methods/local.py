"""Local: every client trains alone and nothing is sent, the lower line that personalized methods are compared with.

No paper; Algorithm 1 of FedAvg (McMahan et al., AISTATS 2017) without its averaging.
"""

from collections.abc import Mapping
from typing import ClassVar

from rayfl.compress.base import Message
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather
from rayfl.methods.base import Carry, Context, Finished, PeerHalf
from rayfl.methods.shared.local_training import GradientMethod, LocalWork
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class Local(GradientMethod, PeerHalf):
    """Every client trains its own model from the common start; the optimizer starts afresh every round."""

    Hyper: ClassVar[type[LocalWork]] = LocalWork
    paper: ClassVar[str] = "no communication; the lower line of personalized methods"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"params": params}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(state["params"])

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return Finished({"params": carry["params"]}, None, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        return state
