"""D-PSGD: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
Parallel Stochastic Gradient Descent, NeurIPS 2017, Algorithm 1; and the form that Dai et al., DisPFL, ICML 2022, and
DFedAvg compare with.

- `order="average_first"`: average with the neighbours, then train locally for `epochs`; x_i <- train(sum_j W_ij x_j).
- `order="lian"`: both from the same point, x_i <- sum_j W_ij x_j - lr g_i(x_i), one step per round unless `epochs` or
  `steps` say more; then lr g_i is replaced by the sum of the steps.

Where the sources leave something open:
- A round here ends with the exchange that the next round of `average_first` begins with. All start from one model, so
  the exchange before the first round would change nothing; the one after the last comes in addition, and
  `own_after_training` is the model without it.
- A peer sends x_j - x_0, and x_0, which all know, is added to the mean: the same average, and entries that an uplink
  compressor drops count as unchanged, not as 0. A peer's own part in its average is its own message, too.
- A peer that is absent from the exchange continues with its own model.
- `density`, the masked D-PSGD of Dis-PFL's Table 3 ("with only 20 % parameters"): all peers keep the same share of the
  entries in all rounds. The paper does not say how they are chosen. Here they are
  drawn at random from the experiment's seed, the same share of every tensor (or by `distribution="erk"`). All peers
  know them, so only values are sent.
"""

from typing import Literal, NotRequired

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    PeerHalf,
    Received,
    Traits,
    Tree,
    WeightedMean,
    tree,
    unused_with,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class DPSGDHyper(LocalWork):
    """Hyper-parameters of D-PSGD; its mixing weights are the topology's."""

    order: Literal["lian", "average_first"] = Field(
        default="average_first",
        description="average_first: train from the average; lian: average and step from the same point",
    )
    density: float | None = Field(
        default=None, gt=0, lt=1, description="share of the entries that the models of all peers have; left out: all"
    )
    distribution: masks.Distribution = Field(
        default="uniform",
        description="densities of the tensors: uniform, or erk",
        json_schema_extra=unused_with(density=[None]),
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="local epochs per round, E (where steps is not given: 1, and one step with lian)",
    )

    def default_work(self) -> dict[str, int]:
        return {"steps": 1} if self.order == "lian" else super().default_work()


class DPSGDState(ModelState):
    """A peer's state, beside its model."""

    mask: NotRequired[Tree]  # with a density, the mask of all peers
    begun: NotRequired[Tree]  # between training and exchange with order="lian", the start of the training


class DPSGDCarry(LocalCarry):
    """A peer's carry."""

    mask: NotRequired[Tree]


class DPSGD(GradientMethod, PeerHalf):
    """A peer trains, and its model becomes the weighted mean of its neighbours' models."""

    hyper: DPSGDHyper
    paper = "Lian et al., NeurIPS 2017"
    capabilities = Capabilities(on_device=True, keeps_parts=True, personalized=True, takes_stale=True)
    gather = {"change": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DPSGDState:
        if self.hyper.density is None:
            return {"params": params}
        density_of = masks.densities(params, self.hyper.density, self.hyper.distribution, 1.0, "all")
        mask = masks.random_mask(params, density_of, draws.common("common mask"))
        return {"params": masks.masked(params, mask), "mask": mask}

    def begin(self, state: DPSGDState, received: Message, ctx: Context) -> DPSGDCarry:
        return self.begun_at(state["params"], state)

    def begun_at(self, params: Tree, state: DPSGDState) -> DPSGDCarry:
        """The carry of a peer that starts training at `params`."""
        carry: DPSGDCarry = {**self.start(params)}
        return {**carry, "mask": state["mask"]} if "mask" in state else carry

    def direction(self, carry: DPSGDCarry, gradient: Tree) -> Tree:
        # An entry whose weight and gradient are 0 has no weight decay and no momentum: it stays exactly 0.
        return masks.masked(gradient, carry["mask"]) if "mask" in carry else gradient

    def finish(self, state: DPSGDState, carry: DPSGDCarry, ctx: Context) -> Finished:
        begun, trained = carry["received"], carry["params"]
        lian = self.hyper.order == "lian"
        new: DPSGDState = {**state, "params": trained}
        if lian:
            new["begun"] = begun
        change = tree.sub(begun if lian else trained, ctx.initial)
        if "mask" in state:
            change = {name: tensor[state["mask"][name]] for name, tensor in change.items()}
        return Finished(new, {"change": change}, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: DPSGDState, received: Received, ctx: Context) -> DPSGDState:
        state = state.copy()
        begun = state.pop("begun", None)
        if not received:
            return state
        average = self.average(received["change"].result, state, ctx.initial)
        if begun is not None:
            average = tree.add(average, tree.sub(state["params"], begun))
        return {**state, "params": average}

    def average(self, change: Tree, state: DPSGDState, initial: Tree) -> Tree:
        """The mean model, from the mean change."""
        if "mask" not in state:
            return tree.add(change, initial)
        average = tree.zeros_like(initial)
        for name, mask in state["mask"].items():
            average[name][mask] = change[name] + initial[name][mask]
        return average
