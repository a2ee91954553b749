"""Compressed gossip: peers send compressed trees, and move by a step gamma towards what their neighbours' trees say.

The mixing matrix W is symmetric, so gossip keeps the mean of all peers. C is the experiment's uplink, as a contraction:
the receivers of an unbiased uplink multiply by 1 / (1 + omega), which costs no bits.

`Gossip` is for methods that send differences. Of each tree y that a peer tells, all its neighbours know a public copy
h_i, the sum of what was sent: q_i = C(y - h_i), h_i += q_i. Of the neighbours' copies a peer needs their sum alone,
s_i = sum_j w_ij h_j (its own included), which moves by sum_j w_ij q_j.
"""

from typing import ClassVar, Literal, cast

from pydantic import Field

from rayfl import tree
from rayfl.methods.base import (
    Context,
    Finished,
    FirstDraws,
    HyperParameters,
    Method,
    Metrics,
    ModelState,
    PeerHalf,
    Received,
    State,
    Traits,
    Tree,
    UplinkMemory,
    WeightedMean,
    compressed,
    contracting,
)


class GossipStep(HyperParameters):
    """The step of compressed gossip."""

    gamma: float | None = Field(
        default=None, gt=0, le=1, description="step towards the neighbours; default: by the uplink's delta"
    )


class CopiedStep(GossipStep):
    """The same, and where public copies begin."""

    hats: Literal["initial", "zero"] = Field(
        default="initial", description="public copies of models before round 0: the common model, or the papers' 0"
    )


class PublicCopies(ModelState, UplinkMemory):
    """The state of a peer that sends differences: its model and, by message name, what is known of its trees."""

    hats: dict[str, Tree]  # h_i
    means: dict[str, Tree]  # s_i


class Gossip(PeerHalf, Method):
    """A peer that tells its neighbours compressed differences. Both ends agree if every message arrives."""

    hyper: GossipStep
    personalized = True
    symmetric = True
    needs_everyone = True
    needs_one_omega = True
    own_feedback = ("uplink",)
    gather = {"model": WeightedMean()}
    share: ClassVar[float] = 1.0
    """gamma / delta, if gamma is not given."""

    def gamma(self, ctx: Context) -> float:
        """The step: as given, or `share` of the contraction's delta, or of 0.1 if the uplink states none.

        If clients have shares of their own, it is the smallest delta of any, so that all take the same step.
        """
        weakest = (ctx.retention_given and ctx.uplink.keeping(ctx.least_ratio)) or ctx.uplink
        factor, stated = contracting(ctx.uplink, ctx.initial), weakest.expected_delta(tree.num_entries(ctx.initial))
        return self.hyper.gamma or self.share * (factor if factor < 1 else stated or 0.1)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        """All know the model of round 0, unless `hats` says otherwise, and of other trees a copy that is 0."""
        first = tree.zeros_like(params) if cast(CopiedStep, self.hyper).hats == "zero" else params
        copies = {name: first if name == "model" else tree.zeros_like(params) for name in self.gather}
        return {"params": params, "hats": copies, "means": copies}

    def pulled(self, name: str, x: Tree, state: State, ctx: Context) -> Tree:
        """x + gamma (s_i - h_i)."""
        return tree.add(x, tree.sub(state["means"][name], state["hats"][name]), self.gamma(ctx))

    def told(self, state: State, trees: dict[str, Tree], metrics: Metrics, ctx: Context) -> Finished:
        """The end of a round in which a peer tells `trees`; its copies move by what it sent."""
        hats, factor = state["hats"], contracting(ctx.uplink, ctx.initial)
        packets, state = compressed(
            cast(PublicCopies, state), {name: tree.sub(one, hats[name]) for name, one in trees.items()}, ctx
        )
        moved = {name: tree.add(hats[name], one.decode_beside(hats[name]), factor) for name, one in packets.items()}
        return Finished({**state, "hats": {**hats, **moved}}, packets, 1.0, metrics)

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        means, factor = state["means"], contracting(ctx.uplink, ctx.initial)
        moved = {name: tree.add(means[name], one.result, factor) for name, one in received.items() if one.count}
        return {**state, "means": {**means, **moved}}
