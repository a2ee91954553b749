"""Classifiers whose head, the last linear layer, a method treats apart from the body, the layers before it.

A representation z [batch, D] is the head's input. Heads are trees with the network's two names, of weight [C, D] and
bias [C].
"""

from typing import TypedDict, TypeVar, cast

import torch
from torch.nn import functional

from rayfl.methods.base import Batch, Capabilities, Context, Message, Plan, Stage, State, Tree
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry

COUNT = "count classes"
"""The stage in which a client counts its examples by class, in its first round."""
AT_ONCE = 1000
"""The batch size of passes that train nothing: it limits their memory, and does not change what they add up."""


class WithHead(GradientMethod):
    """A client that tells the body from the head."""

    capabilities = Capabilities(needs_features=True)

    @property
    def head_names(self) -> tuple[str, str]:
        """The names of the head's weight and bias."""
        return f"{self.task.head}.weight", f"{self.task.head}.bias"

    def head_of(self, params: Tree) -> Tree:
        """The head's tensors."""
        return {name: params[name] for name in self.head_names}

    def body_of(self, params: Tree) -> Tree:
        """All other tensors."""
        return {name: tensor for name, tensor in params.items() if name not in self.head_names}

    def features(self, params: Tree, batch: Batch, training: bool = True) -> torch.Tensor:
        """The representations z [batch, D] of a batch under the whole network `params`."""
        return self.task.loss_and_features(params, batch, training)[1]

    def logits(self, features: torch.Tensor, head: Tree) -> torch.Tensor:
        """The outputs [batch, C] of a head for representations."""
        weight, bias = (head[name] for name in self.head_names)
        return functional.linear(features, weight, bias)

    def one_hot(self, batch: Batch, num_classes: int) -> torch.Tensor:
        """float32 [C, batch]: 1 where an example is of a class, 0 for padding."""
        classes = batch.labels == torch.arange(num_classes, device=batch.labels.device)[:, None]
        return batch.without_padding(classes.float())


class CountedState(TypedDict):
    """The state of a client that counts its examples by class."""

    counts: torch.Tensor  # float32 [C], of the train split; 0 before the first round


class CountedCarry(LocalCarry, CountedState):
    """The carry of such a client."""


Counting = TypeVar("Counting", bound=CountedCarry)
"""The carry of a method that adds to `CountedCarry`."""


class CountsClasses(WithHead):
    """A client that counts its examples by class, in a stage of its first round that costs nothing."""

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(Stage(COUNT, epochs=1, batch_size=AT_ONCE, free=True), self.hyper.stage(round_number)))

    def stages(self, state: CountedState, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        known = bool(state["counts"].any())
        return tuple(stage for stage in plan.stages if not (known and stage.name == COUNT))

    def no_counts(self, params: Tree) -> torch.Tensor:
        """The counts of a client that has counted nothing yet."""
        return torch.zeros(len(params[self.head_names[1]]))

    def begin(self, state: CountedState, received: Message, ctx: Context) -> CountedCarry:
        return {**super().begin(cast(State, state), received, ctx), "counts": state["counts"]}

    def counted(self, carry: Counting, batch: Batch) -> Counting:
        """The carry after a batch of the stage `COUNT`."""
        counts = carry["counts"] + self.one_hot(batch, len(carry["counts"])).sum(dim=1)
        return cast(Counting, {**carry, "counts": counts})
