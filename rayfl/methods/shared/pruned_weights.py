"""Real weights pruned by magnitude to a peer's share: a baseline of MCE-PL, whose peers keep unequal shares.

Source: Tian et al., MCE-PL, section V-C. Layers are the tensors of two or more dimensions; each keeps its
`learned_masks.num_kept` largest |w|. Everything of one dimension (biases, norms) is trained and never pruned. A round
is one minibatch. The gradient is dense, taken at the pruned model, so that pruned weights can come back.

`hard=true` is the paper's sentence, "after each iteration prunes": pruned weights are 0. `hard=false` is the authors'
code (of ind-weipru; the others have none): the dense weights are kept, and the model is w o m with the largest |w| of
each layer; its gradient moves all of w (straight through the mask), and a pruned weight comes back with its value.
After an exchange the mean replaces w at entries that somebody sent; at the others the peer keeps its own value.
"""

import torch

from rayfl.compress.sparse import sparse_packet
from rayfl.methods.base import Context, Field, Finished, FirstDraws, Traits, Tree, tree
from rayfl.methods.shared import masks
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.learned_masks import layer_masks, layer_ratios, masked_part
from rayfl.methods.shared.masked_peer import MaskedPeer, MaskedPeerHyper


class PrunedWeightsHyper(MaskedPeerHyper):
    """Hyper-parameters of methods that prune real weights.

    MCE-PL's values for unequal shares, except its lr = 0.001: a round is one minibatch, so that this is meant for
    thousands of rounds. In 30 rounds of the demo's data (digits, 20 clients on a ring, seed 1) own/accuracy is 0.13 to
    0.16 with 0.001, and 0.89 with 0.3.
    """

    lr: float = Field(default=0.3, gt=0, description="learning rate (0.001 in MCE-PL, for thousands of rounds)")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty on the weights (5e-4 in the authors' code)")
    hard: bool = Field(default=True, description="whether pruned weights are set to 0, instead of only masked")


class WeightsState(masks.Masked):
    """The state of a peer that prunes."""

    weights: Tree  # dense unless `hard`; the mask says what the model keeps of them


class PrunedWeights(MaskedPeer):
    """A peer that takes a gradient step, prunes its weights and may send the rest."""

    hyper: PrunedWeightsHyper

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> WeightsState:
        return self.kept(params, client)

    def mask_of(self, weights: Tree, client: Traits) -> Tree:
        """The entries of `weights` that the client keeps: a share of each layer, and all of the rest."""
        layers, hyper = masked_part(weights), self.hyper
        ratios = layer_ratios(layers, masks.kept_ratio(client, hyper.retention_ratio, 0.5), None)
        kept = layer_masks(layers, ratios, hyper.fil, hyper.fil_share)
        return {n: kept[n] if n in kept else torch.ones_like(w, dtype=torch.bool) for n, w in weights.items()}

    def kept(self, weights: Tree, client: Traits) -> WeightsState:
        """The state of a client with these weights."""
        mask = self.mask_of(weights, client)
        return {"weights": masks.masked(weights, mask) if self.hyper.hard else weights, "mask": mask}

    def stepped(self, state: WeightsState, carry: GradientCarry, ctx: Context) -> WeightsState:
        """The state after the step w - lr (g(model) + weight decay)."""
        weights, lr = state["weights"], ctx.plan.stages[0].lr
        weights = tree.add(tree.add(weights, weights, -lr * self.hyper.weight_decay), carry["gradient"], -lr)
        return self.kept(weights, ctx.traits)

    def averaged(self, state: WeightsState, mean: Tree, ctx: Context) -> WeightsState:
        """The state after an exchange whose messages have this mean."""
        if not self.hyper.hard:
            mean = {name: torch.where(mean[name] != 0, mean[name], weight) for name, weight in state["weights"].items()}
        return self.kept(mean, ctx.traits)

    def finish(self, state: WeightsState, carry: GradientCarry, ctx: Context) -> Finished:
        """One step, pruned and sent; a metric bills the message as the paper does, 4 bytes a weight, pruned or not."""
        new = self.stepped(state, carry, ctx)
        message = {"weights": sparse_packet(self.own_model(new), new["mask"])}
        bill = {"comm/link_megabytes": 4e-6 * tree.num_entries(new["weights"])}
        return Finished(new, message, 1.0, self.trained(carry) | bill)

    def own_model(self, state: WeightsState) -> Tree:
        return masks.masked(state["weights"], state["mask"])
