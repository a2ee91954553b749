"""avr-weipru: peers average pruned real weights; Tian et al., MCE-PL, section V-C.

One minibatch per round: a peer takes a step, prunes by magnitude, and sends the rest. Its model becomes the mean of the
models that it received, zeros included, pruned to its own share again. Our decisions: its own model is part of the
mean, the mean is pruned, and the common initial model is pruned before the first step. The topology gives the weights
of neighbours. A peer that received nothing continues with its own pruned model. Real bytes are those of a sparse
packet; the paper bills 4 bytes for every weight, pruned or not (comm/link_megabytes). `hard=false`: see
shared/pruned_weights.py.
"""

from rayfl.methods.base import Capabilities, Context, Received, WeightedMean
from rayfl.methods.shared.pruned_weights import PrunedWeights, WeightsState


class AvrWeipru(PrunedWeights):
    """A peer's model becomes the mean of the pruned models, pruned again."""

    paper = "Tian et al., MCE-PL, pruned real weights averaged"
    capabilities = Capabilities(on_device=True)
    gather = {"weights": WeightedMean()}

    def mix(self, state: WeightsState, received: Received, ctx: Context) -> WeightsState:
        return self.averaged(state, received["weights"].result, ctx) if received else state
