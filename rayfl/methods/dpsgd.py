"""D-PSGD: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
Parallel Stochastic Gradient Descent, NeurIPS 2017, Algorithm 1; and the form that Dai et al., DisPFL, ICML 2022, and
DFedAvg compare with.

- `order="average_first"`: average with the neighbours, then train locally for `epochs`; x_i <- train(sum_j W_ij x_j).
- `order="lian"`: both from the same point, x_i <- sum_j W_ij x_j - lr g_i(x_i), one step a round unless `epochs` or
  `steps` say more; then what all of them moved by takes the place of lr g_i.

What the sources leave open:
- A round here ends with the exchange that the next round of `average_first` begins with. All start from one model, so
  the exchange before the first round would change nothing; the one after the last comes in addition, and
  `own_after_training` is the model without it.
- What is sent is x_j - x_0, and x_0, which all know, is added to the mean: the same average, and an uplink compressor
  that drops entries then takes them for unchanged, not for 0. A peer's own part in its average is what it sent, too.
- A peer that is away from the exchange trains on from its own model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, PeerHalf, Stage
from rayfl.methods.shared.local_training import GradientMethod, LocalWork
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class DPSGDHyper(LocalWork):
    """Hyper-parameters of D-PSGD; its mixing weights are the topology's."""

    order: Literal["lian", "average_first"] = Field(
        default="average_first",
        description="average_first: train from the average; lian: average and step from the same point",
    )
    epochs: int | None = Field(
        default=None, ge=1, description="local epochs a round, E (where steps is not given: 1, and one step with lian)"
    )

    def stage(self, round: int, name: str = "train") -> Stage:
        stage = super().stage(round, name)
        one_step = self.order == "lian" and self.epochs is None and self.steps is None
        return replace(stage, epochs=None, steps=1) if one_step else stage


class DPSGD(GradientMethod, PeerHalf):
    """State: the peer's model; between training and exchange with `order="lian"` also where the training began."""

    Hyper: ClassVar[type[DPSGDHyper]] = DPSGDHyper
    hyper: DPSGDHyper
    paper: ClassVar[str] = "Lian et al., NeurIPS 2017"
    personalized: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"change": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"params": params}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.start(state["params"])

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        begun, trained = carry["received"], carry["params"]
        lian = self.hyper.order == "lian"
        new = {**state, "params": trained, **({"begun": begun} if lian else {})}
        change = tree.sub(begun if lian else trained, ctx.initial)
        return Finished(new, {"change": change}, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        state = dict(state)
        begun = state.pop("begun", None)
        if not received:
            return state
        average = tree.add(received["change"].result, ctx.initial)
        if begun is not None:
            average = tree.add(average, tree.sub(state["params"], begun))
        return {**state, "params": average}

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return {"params": carry["params"] if carry is not None else state["params"]}
