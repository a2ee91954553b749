"""A peer method and a schedule of your own, for peers on their own clocks.

rayfl run jobs/examples/cautious_peers.toml

CautiousPeers: D-PSGD whose peers go only a share of the way to the mean of what they have heard. Fading: the older a
message is, the less of its weight it keeps; the peer itself gets the rest.
"""

from pydantic import Field

from rayfl.methods.base import Capabilities, Context, Received, tree
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDHyper, DPSGDState
from rayfl.schedules.base import PeerSchedule


class CautiousPeersHyper(DPSGDHyper):
    """The settings of D-PSGD, and the share."""

    towards: float = Field(default=0.5, gt=0, le=1, description="share of the way to the mean")


class CautiousPeers(DPSGD):
    """x_i <- x_i + towards (sum_j W_ij x_j - x_i)."""

    hyper: CautiousPeersHyper
    paper = "an example"
    # A peer can mix messages of any age, so that the method can be used under a PeerSchedule.
    capabilities = Capabilities(takes_stale=True)

    def mix(self, state: DPSGDState, received: Received, ctx: Context) -> DPSGDState:
        mixed = super().mix(state, received, ctx)
        step = tree.sub(mixed["params"], state["params"])
        return {**mixed, "params": tree.add(state["params"], step, self.hyper.towards)}


class Fading(PeerSchedule):
    """A message keeps the share half_life / (half_life + staleness) of its weight."""

    half_life: float = Field(default=1.0, gt=0, description="staleness, in rounds, at which half of the weight is left")

    def scale(self, staleness: float) -> float:
        return self.half_life / (self.half_life + staleness)
