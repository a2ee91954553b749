"""ind-weipru: every peer alone trains real weights and prunes them by magnitude; Tian et al., MCE-PL, section V-C.

One minibatch per round; the start is pruned too. shared/pruned_weights.py says what `hard` does: the paper prunes hard
after every iteration, as avr-weipru and par-weipru do, and the authors' code does not.
"""

from rayfl.methods.base import Capabilities, Context, Finished
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.pruned_weights import PrunedWeights, WeightsState


class IndWeipru(PrunedWeights):
    """No communication."""

    paper = "Tian et al., MCE-PL, real weights without communication"
    capabilities = Capabilities(on_device=True)

    def finish(self, state: WeightsState, carry: GradientCarry, ctx: Context) -> Finished:
        return Finished(self.stepped(state, carry, ctx), None, 1.0, self.trained(carry))
