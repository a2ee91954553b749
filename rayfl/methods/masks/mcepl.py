"""MCE-PL: Tian, Zhang, Li and Bennis, Communication-Efficient Personalized Distributed Learning with Data and Node
Heterogeneity, Algorithm 1.

All peers have the same random weights w, which never change. A peer learns a mask m_i of its own on them, by way of
scores z_i, and sends that mask, one bit per entry. mbar is the mean of the neighbours' masks, its own left out. With
Agg(z, mbar) = z + mean(|z|) sign(z) o mbar for every layer, Thres and Fil as in shared/learned_masks.py, iteration k is

    m^(k-1)   = Fil[Thres(Agg(z^(k-1), mbar^(k-3/2)))]                      the model w o m^(k-1) sees one minibatch
    G         = (df/dv) o w o sign(z^(k-1)) + lambda z / ||z_row||          (14), (15), and the gradient of (7)
    z^(k-1/2) = z^(k-1) - eta G,  m^(k-1/2) = Fil[Thres(Agg(z^(k-1/2), mbar^(k-3/2)))]     (16), which is sent
    z^(k)     = z^(k-1/2) - eta G o mbar^(k-1/2)                            (17), with the stored gradient
    m^(k)     = Fil[Thres(Agg(z^(k), mbar^(k-1/2)))]                        (18), (19), which is evaluated

Where the paper is silent, or the authors' code differs:
- mbar^(-1/2) is one Bernoulli mask that all peers know, of 0.3 in convolutions and 0.9 in linear layers as in the code.
- The lasso is in the stored gradient; weight decay (none in the paper) is not.
- The paper gives no threshold for Fil. Here it is 20, where the code zeroes 20 too, but at most a
  twentieth of a filter, and the last layer is spared, so that no class is lost.
- A peer that received nothing keeps its last mbar, and skips (17).
- The topology gives the weights of neighbours; its default, uniform weights, is the paper's.
- Biases exist in linear layers, as in the code; they stay at their initial values, like everything of one dimension.
- The paper's weights are uniform in [-1, 1] in its section V-A (`weight_init="uniform"`), and not described elsewhere;
  by default they are the model's initial ones. A masked layer carries less of a signal: `weight_scale` makes up for it
  (PyTorch's default initial values need about sqrt(6 / r) before a ReLU), 3 by default. lr is 1 in the paper, 0.3 here.
- The code: `fc_retention_ratio=0.9 fil=0 lasso=0 weight_decay=5e-4 lr=10 weight_scale=1`.
- The paper bills one bit per entry, as is sent (comm/link_megabytes); the code's counter has a bit for each
  one in the mask (comm/link_ones_megabytes).
"""

from typing import NotRequired

import numpy as np
import torch

from rayfl.compress.masks import mask_packet
from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    RayflError,
    Received,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.learned_masks import HiddenMaskHyper, HiddenMasks, ScoredModel, masked_part


class MCEPLHyper(HiddenMaskHyper):
    """Hyper-parameters of MCE-PL."""

    finetune_lr: float | None = Field(
        default=None, ge=0, description="learning rate of the fine-tuning step (10 in the authors' code); default: lr"
    )
    first_conv: float = Field(default=0.3, ge=0, le=1, description="share of ones in the first mbar, convolutions")
    first_fc: float = Field(default=0.9, ge=0, le=1, description="the same in layers of two dimensions")


class MCEPLState(ScoredModel):
    """A peer's state, beside its scores, mask and model."""

    heard: Tree  # mbar
    gradient: NotRequired[Tree]  # between training and exchange, the stored gradient


class MCEPL(HiddenMasks):
    """Peers send their masks and learn from the mean of their neighbours' masks."""

    hyper: MCEPLHyper
    paper = "Tian et al., MCE-PL"
    capabilities = Capabilities(on_device=True, include_self=False, takes_stale=True)
    gather = {"mask": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> MCEPLState:
        z, heard = self.scores_for(params, draws), self.first_heard(params, draws)
        return {"scores": z, "heard": heard, **self.masked_by(aggregated(z, heard), client, params)}

    def check_model(self, params: Tree) -> None:
        dims = {tensor.dim() == 2 for tensor in masked_part(params).values()}
        for name, of_two in (("first_conv", False), ("first_fc", True)):
            if self.hyper.is_given(name) and of_two not in dims:
                raise RayflError(
                    f"method.{name}={getattr(self.hyper, name)} does nothing, as the model has no layer of "
                    f"{'two' if of_two else 'more than two'} dimensions; remove it"
                )

    def first_heard(self, params: Tree, draws: FirstDraws) -> Tree:
        """mbar before the first exchange: the same for all peers of a run."""
        generator = draws.common("common mask")

        def draw(layer: torch.Tensor) -> torch.Tensor:
            share = self.hyper.first_fc if layer.dim() == 2 else self.hyper.first_conv
            return torch.from_numpy((generator.random(tuple(layer.shape)) < share).astype(np.float32))

        return tree.map(draw, masked_part(params))

    def finish(self, state: MCEPLState, carry: GradientCarry, ctx: Context) -> Finished:
        gradient, z = self.descend(state, carry, ctx)
        masked = self.masked_by(aggregated(z, state["heard"]), ctx.traits, ctx.initial)
        new: MCEPLState = {**state, "scores": z, "gradient": gradient, **masked}
        # One vector, so that no layer's bits are filled up to whole bytes.
        bits = tree.vector(masked["mask"])
        bill = {"comm/link_megabytes": bits.numel() / 8e6, "comm/link_ones_megabytes": int(bits.sum()) / 8e6}
        return Finished(new, {"mask": mask_packet({"mask": bits})}, 1.0, self.trained(carry) | bill)

    def mix(self, state: MCEPLState, received: Received, ctx: Context) -> MCEPLState:
        state = state.copy()
        gradient = state.pop("gradient")
        if not received or not received["mask"].count:
            return state
        heard = tree.unvector(received["mask"].result["mask"], state["scores"])
        rate = ctx.plan.stages[0].lr if self.hyper.finetune_lr is None else self.hyper.finetune_lr
        z = tree.add(state["scores"], tree.mul(gradient, heard), -rate)
        masked = self.masked_by(aggregated(z, heard), ctx.traits, ctx.initial)
        return {**state, "scores": z, "heard": heard, **masked}


def aggregated(z: Tree, heard: Tree) -> Tree:
    """Agg(z, mbar) = z + mean(|z|) sign(z) o mbar; the mean runs over all entries of a layer."""
    return {name: layer + layer.abs().mean() * layer.sign() * heard[name] for name, layer in z.items()}
