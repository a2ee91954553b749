"""Compressed gossip: peers send compressed trees, and take a step gamma towards the weighted mean of their neighbours.

The mixing matrix W is symmetric, so gossip keeps the mean of all peers. C is the experiment's uplink, as a contraction:
the receivers of an unbiased uplink multiply by 1 / (1 + omega), which costs no bits.

`Gossip` implements methods that send differences; DeepSqueeze, which sends models, overrides its hooks. For each tree y
that a peer sends, all its neighbours know a public copy h_i, the sum of everything sent: q_i = C(y - h_i), h_i += q_i.
A peer does not store the neighbours' copies, but only their weighted sum s_i = sum_j w_ij h_j (its own copy included),
which moves by sum_j w_ij q_j.
"""

from typing import ClassVar, Literal, cast

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
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
    tree,
)


class GossipStep(HyperParameters):
    """The step of compressed gossip."""

    gamma: float | None = Field(
        default=None, gt=0, le=1, description="step towards the neighbours; default: from the uplink's delta"
    )


class CopiedStep(GossipStep):
    """The step of compressed gossip, and the initial value of the public copies."""

    hats: Literal["initial", "zero"] = Field(
        default="initial", description="public copies of models before round 0: the common model, or 0 as in the papers"
    )


class PublicCopies(ModelState, UplinkMemory):
    """The state of a peer that sends differences: its model and, by message name, its copies and weighted sums."""

    hats: dict[str, Tree]  # h_i
    means: dict[str, Tree]  # s_i


class Gossip(PeerHalf, Method):
    """A peer that sends its neighbours compressed differences. Copies agree at both ends if every message arrives."""

    hyper: GossipStep
    capabilities = Capabilities(
        personalized=True,
        needs_weights="symmetric",
        needs_everyone=True,
        needs_one_omega=True,
        own_feedback=("uplink",),
    )
    gather = {"model": WeightedMean()}
    share: ClassVar[float] = 1.0
    """The default gamma, as a multiple of delta."""

    def gamma(self, ctx: Context) -> float:
        """The setting `gamma`, by default `share` times the contraction's delta (0.1 if the uplink states none).

        If clients have retention ratios of their own, delta is the smallest one, so that all take the same step.
        """
        weakest = (ctx.retention_given and ctx.uplink.keeping(ctx.least_ratio)) or ctx.uplink
        factor, stated = contracting(ctx.uplink, ctx.initial), weakest.expected_delta(tree.num_entries(ctx.initial))
        return self.hyper.gamma or self.share * (factor if factor < 1 else stated or 0.1)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        """Copies of the model begin at the common model (at 0 with hats="zero"), copies of other trees at 0."""
        first = tree.zeros_like(params) if cast(CopiedStep, self.hyper).hats == "zero" else params
        copies = {name: first if name == "model" else tree.zeros_like(params) for name in self.gather}
        return {"params": params, "hats": copies, "means": copies}

    def pulled(self, name: str, x: Tree, state: State, ctx: Context) -> Tree:
        """x + gamma (s_i - h_i)."""
        return tree.add(x, tree.sub(state["means"][name], state["hats"][name]), self.gamma(ctx))

    def told(self, state: State, trees: dict[str, Tree], metrics: Metrics, ctx: Context) -> Finished:
        """End a round that sends the compressed differences of `trees`; the copies h_i move by what was sent."""
        hats, factor = state["hats"], contracting(ctx.uplink, ctx.initial)
        packets, state = compressed(
            cast(PublicCopies, state), {name: tree.sub(x, hats[name]) for name, x in trees.items()}, ctx
        )
        moved = {
            name: tree.add(hats[name], packet.decode_beside(hats[name]), factor) for name, packet in packets.items()
        }
        return Finished({**state, "hats": {**hats, **moved}}, packets, 1.0, metrics)

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        means, factor = state["means"], contracting(ctx.uplink, ctx.initial)
        moved = {
            name: tree.add(means[name], gathered.result, factor)
            for name, gathered in received.items()
            if gathered.count
        }
        return {**state, "means": {**means, **moved}}
