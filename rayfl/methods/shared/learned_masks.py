"""Masks that are learned on fixed random weights, the strong lottery ticket: every weight has a score z, and the
largest |z| of a layer are kept.

Source: Tian, Zhang, Li and Bennis, Communication-Efficient Personalized Distributed Learning with Data and Node
Heterogeneity (MCE-PL), sections II-B and III-B. A tensor of two or more dimensions is masked, the others (biases,
norms) stay as they are. A layer is such a tensor; its rows, along the first dimension, are the output filters or
neurons. All trees of scores and masks hold the masked tensors alone.
"""

import math
from typing import Literal

import numpy as np
import torch

from rayfl.compress.largest import top_k_mask
from rayfl.compress.values import entries_on_device
from rayfl.methods.base import Context, Field, FirstDraws, Traits, Tree, tree
from rayfl.methods.shared import masks
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.masked_peer import MaskedPeer, MaskedPeerHyper

WeightInit = Literal["model", "uniform", "signed_constant", "kaiming"]


class HiddenMaskHyper(MaskedPeerHyper):
    """Hyper-parameters of methods that learn masks; a round is one minibatch.

    MCE-PL's values, except its lr = 1 with the model's own weights, which stays at chance on convolutional networks.
    In 30 rounds of the demo's data (digits, 20 peers on a ring, seed 1) own/accuracy of `mcepl` is 0.643 with these
    and 0.886 with the defaults, of `ind_mask` 0.610 and 0.863.
    """

    lr: float = Field(default=0.3, gt=0, description="learning rate of the scores, eta (1 in MCE-PL)")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty on the scores (5e-4 in the authors' code)")
    lasso: float = Field(default=1e-3, ge=0, description="weight of the group lasso, lambda (0 in the authors' code)")
    fc_retention_ratio: float | None = Field(
        default=None, gt=0, le=1, description="share kept of layers of two dimensions (0.9 in the authors' code)"
    )
    fil: int = Field(
        default=20,
        ge=0,
        description="drop filters that keep fewer entries than this, except in the last layer; 0: none",
    )
    weight_init: WeightInit = Field(
        default="model",
        description="fixed weights of the layers: model's own, uniform on [-1, 1], signed_constant or kaiming (normal)",
    )
    weight_scale: float | None = Field(
        default=None,
        gt=0,
        description="factor on the fixed weights of the layers, so that masked ones carry a signal (left out: 3 on the "
        "model's own, else 1)",
    )
    different_initial: bool = Field(default=True, description="whether every peer starts with scores of its own")

    @property
    def scale(self) -> float:
        """The factor on the fixed weights of the layers."""
        return self.weight_scale or (3.0 if self.weight_init == "model" else 1.0)


def masked_part(params: Tree) -> Tree:
    """The tensors that masks are for."""
    return {name: tensor for name, tensor in params.items() if tensor.dim() > 1}


def num_kept(num_entries: int, ratio: float) -> int:
    """n - int((1 - r) n + 1e-9): how many of a layer's n entries the threshold leaves."""
    return num_entries - int((1 - ratio) * num_entries + 1e-9)


def threshold(name: str, y: torch.Tensor, ratio: float) -> torch.Tensor:
    """Thres_r: exactly `num_kept` True, the largest |y|, ties to the lowest index. ValueError on NaN and infinity."""
    return top_k_mask(entries_on_device(name, y), num_kept(y.numel(), ratio)).view(y.shape)


def without_thin_rows(mask: torch.Tensor, least: float) -> torch.Tensor:
    """Fil_c: rows with fewer than `least` True become False altogether."""
    return mask & (mask.flatten(1).sum(dim=1) >= least).view(-1, *[1] * (mask.dim() - 1))


def layer_ratios(layers: Tree, ratio: float, fc_ratio: float | None) -> dict[str, float]:
    """The share that each layer keeps; `fc_ratio`, if given, holds for layers of two dimensions."""
    return {name: fc_ratio if fc_ratio and layer.dim() == 2 else ratio for name, layer in layers.items()}


def layer_masks(y: Tree, ratios: dict[str, float], fil: float = 0, fil_share: float = 1.0) -> Tree:
    """Fil[Thres(y)] layer by layer: c = min(fil, fil_share * entries of a row), but 0 in the last layer."""
    by_layer = {name: threshold(name, layer, ratios[name]) for name, layer in y.items()}
    for name in list(by_layer)[:-1]:
        row = by_layer[name][0].numel()
        by_layer[name] = without_thin_rows(by_layer[name], min(fil, fil_share * row))
    return by_layer


def first_scores(layers: Tree, generator: np.random.Generator) -> Tree:
    """Uniform within 1 / sqrt(entries of a row) (Kaiming's with a = sqrt(5)), and not 0: such a score cannot learn."""

    def draw(layer: torch.Tensor) -> torch.Tensor:
        bound = 1 / math.sqrt(layer[0].numel())
        drawn = generator.uniform(-bound, bound, tuple(layer.shape)).astype(np.float32)
        return torch.from_numpy(np.where(drawn == 0, np.float32(bound), drawn))

    return tree.map(draw, layers)


def first_weights(layers: Tree, kind: WeightInit, generator: np.random.Generator) -> Tree:
    """The layers' fixed weights: as they are; uniform on [-1, 1] (MCE-PL, section V-A); or, with s = sqrt(2 / entries
    of a row), the root of Kaiming's variance, s with a random sign (Ramanujan et al., What's Hidden in a Randomly
    Weighted Neural Network?, CVPR 2020), or normal with standard deviation s.
    """

    def draw(layer: torch.Tensor) -> torch.Tensor:
        shape, deviation = tuple(layer.shape), math.sqrt(2 / layer[0].numel())
        if kind == "uniform":
            drawn = generator.uniform(-1, 1, shape)
        elif kind == "signed_constant":
            drawn = deviation * generator.choice([-1.0, 1.0], shape)
        else:
            drawn = deviation * generator.standard_normal(shape)
        return torch.from_numpy(drawn.astype(np.float32))

    return layers if kind == "model" else tree.map(draw, layers)


def lasso_gradient(scores: Tree, strength: float) -> Tree:
    """The gradient of lambda * sum over rows of ||z_row||_2, which is lambda * z / ||z_row||; 0 for a row of zeros."""

    def rows(z: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(z.flatten(1), dim=1).view(-1, *[1] * (z.dim() - 1))
        return strength * torch.where(norms > 0, z / norms, 0.0)

    return tree.map(rows, scores)


class ScoredModel(masks.MaskedModel):
    """The state of a peer that learns its mask; "params" are w o m, which is evaluated and trained next."""

    scores: Tree  # z


class HiddenMasks(MaskedPeer):
    """A peer that learns a mask of its own on the initial weights, which never change and are never sent."""

    hyper: HiddenMaskHyper

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        layers = first_weights(masked_part(params), self.hyper.weight_init, draws.common("common weights"))
        return {**params, **layers}

    def scores_for(self, params: Tree, draws: FirstDraws) -> Tree:
        """The scores z^(0) of a client."""
        generator = draws.own if self.hyper.different_initial else draws.common("common scores")
        return first_scores(masked_part(params), generator)

    def weights(self, initial: Tree) -> Tree:
        """w, from the parameters of round 0: the layers scaled, the rest as it is."""
        scale = self.hyper.scale
        return initial if scale == 1 else {**initial, **tree.scale(masked_part(initial), scale)}

    def descend(self, state: ScoredModel, carry: GradientCarry, ctx: Context) -> tuple[Tree, Tree]:
        """G, the gradient of the scores with the lasso's, and z - lr (G + weight decay)."""
        z, lr = state["scores"], ctx.plan.stages[0].lr
        weights = self.weights(ctx.initial)
        # Of v = w o m, with sign(z) in place of the mask's derivative.
        gradient = {name: carry["gradient"][name] * weights[name] * score.sign() for name, score in z.items()}
        if self.hyper.lasso:
            gradient = tree.add(gradient, lasso_gradient(z, self.hyper.lasso))
        return gradient, tree.add(tree.add(z, z, -lr * self.hyper.weight_decay), gradient, -lr)

    def masked_by(self, y: Tree, client: Traits, initial: Tree) -> masks.MaskedModel:
        """Mask and model of a client; y is thresholded, and `initial` are the parameters of round 0."""
        hyper, weights = self.hyper, self.weights(initial)
        ratio = masks.kept_ratio(client, hyper.retention_ratio, 0.5)
        mask = layer_masks(y, layer_ratios(y, ratio, hyper.fc_retention_ratio), hyper.fil, hyper.fil_share)
        return {"mask": mask, "params": {**weights, **masks.masked(masked_part(weights), mask)}}
