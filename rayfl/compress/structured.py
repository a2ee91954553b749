"""Structured sparsification: whole filters and channels of a tensor are sent or left out, by the sum of magnitudes."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from rayfl.compress.base import (
    Buffers,
    Compressor,
    Packet,
    RayflError,
    Shapes,
    Tree,
    entries,
    shapes_of,
    tensor_over,
    unpack_bits,
    zeros_of,
)

Scores = Literal["normalized", "raw"]

HALVINGS = 40
"""Steps of the search for the threshold of a keep_ratio."""


@dataclass(frozen=True)
class StructuredCodec:
    """Reads "<name>.values" (fp32: the kept block row by row), and of tensors with two or more dimensions the bitmaps
    "<name>.filters" [ceil(O / 8)] and "<name>.channels" [ceil(I / 8)] of the kept indices of dimensions 0 and 1."""

    shapes: Shapes

    def decode(self, parts: Buffers) -> Tree:
        decoded = zeros_of(self.shapes)
        self.add_to(parts, decoded, 1.0)
        return decoded

    def support(self, parts: Buffers) -> Tree:
        masks = {}
        for name, shape in self.shapes:
            filters, channels = self._kept(parts, name, shape)
            mask = filters.view(-1, 1, 1) & channels.view(-1, 1)
            masks[name] = mask.expand(_cube(shape)).reshape(shape)
        return masks

    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        """Adds at the sent positions only; every tensor of `total` must be contiguous."""
        for name, shape in self.shapes:
            cube = total[name].view(_cube(shape))
            block = tensor_over(parts[f"{name}.values"])
            if block.numel():
                kept = self._kept(parts, name, shape)
                filters, channels = (mask.nonzero().view(-1).to(cube.device) for mask in kept)
                block = block.view(filters.numel(), channels.numel(), -1) * weight
                cube[filters.view(-1, 1), channels] += block.to(cube)

    def num_values(self, parts: Buffers) -> int:
        return sum(parts[f"{name}.values"].size for name, _ in self.shapes)

    def _kept(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept filters and channels, boolean [O] and [I]; all of a tensor of one dimension."""
        num_filters, num_channels, _ = _cube(shape)
        if len(shape) < 2:
            return torch.ones(num_filters, dtype=torch.bool), torch.ones(num_channels, dtype=torch.bool)
        return (
            unpack_bits(parts[f"{name}.filters"], (num_filters,)),
            unpack_bits(parts[f"{name}.channels"], (num_channels,)),
        )


class Structured(Compressor, on_device=True):
    """Of every tensor [O, I, ...] the filters (first dimension; rows) and channels (second; columns) whose score is at
    least a threshold. Tensors of one dimension or none are sent whole.

    `scores` "normalized": sums of magnitudes over the largest of them, in [0, 1], those of channels after the filters
    were cut. "raw": the sums themselves, both before anything is cut. `threshold` (0.3): for all tensors. `keep_ratio`:
    each tensor its own normalised threshold, the one that keeps the number of entries nearest to keep_ratio * n.
    Bits: 32 for every entry in the kept filters and channels; ceil(O / 8) + ceil(I / 8) bytes of bitmaps.
    Biased: wrap it in feedback. The source's thresholds are on raw sums.
    Source: Wu, Yao, Lu, Wang, "FedSCR: Structure-Based Communication Reduction for Federated Learning", IEEE TPDS 2021;
    normalised scores as in SecretFlow.
    """

    name = "structured"
    threshold: float | None = Field(
        default=None, ge=0, description="least score of what is sent; 0.3 if keep_ratio is not given either"
    )
    keep_ratio: float | None = Field(
        default=None, gt=0, le=1, description="share of each tensor's entries that is sent, in place of a threshold"
    )
    scores: Scores = Field(default="normalized", description="sums of magnitudes; normalized: over the largest of them")

    @model_validator(mode="after")
    def _one_rule(self) -> "Structured":
        if self.keep_ratio is not None and (self.threshold is not None or self.scores == "raw"):
            raise RayflError(
                " chooses normalized thresholds; leave out threshold and scores, or keep_ratio", key=("keep_ratio",)
            )
        if self.scores == "normalized" and self.limit > 1:
            raise RayflError(
                f"={self.threshold} is above 1, the largest normalized score; give one in [0, 1]", key=("threshold",)
            )
        return self

    @property
    def limit(self) -> float:
        """The fixed threshold."""
        return 0.3 if self.threshold is None else self.threshold

    def keeping(self, ratio: float) -> "Structured | None":
        """None if a threshold is given, because a threshold is not a share."""
        fixed = self.threshold is not None or self.scores == "raw"
        return None if fixed else self.model_copy(update={"keep_ratio": ratio})

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Values and bitmaps; draws nothing. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            cube = entries(name, tensor).numpy().reshape(_cube(tuple(tensor.shape)))
            if tensor.ndim < 2:
                parts[f"{name}.values"] = cube.reshape(-1).copy()
                continue
            filters, channels = self.choose(cube)
            parts[f"{name}.values"] = cube[np.ix_(filters, channels)].reshape(-1)
            parts[f"{name}.filters"] = np.packbits(filters)
            parts[f"{name}.channels"] = np.packbits(channels)
        return Packet(parts, StructuredCodec(shapes_of(x))), memory

    def choose(self, cube: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boolean [O] and [I] of the kept filters and channels of a tensor [O, I, rest]."""
        mass = np.abs(cube).sum(axis=2, dtype=np.float64)
        if self.scores == "raw":
            return mass.sum(axis=1) >= self.limit, mass.sum(axis=0) >= self.limit
        return cut(mass, self.limit if self.keep_ratio is None else threshold_for(mass, self.keep_ratio))

    def delta(self, num_entries: int) -> float | None:
        """1 / n^3 with normalised scores: the channel of most mass in the kept filters, which include that of most
        mass, has 1 / n of all magnitudes in at most n entries. None with raw ones: all may be below the threshold."""
        return None if self.scores == "raw" else 1 / max(1, num_entries) ** 3


def cut(mass: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Kept filters [O] and channels [I] at a normalised threshold; `mass` [O, I] are the sums of magnitudes."""
    filters = _normalized(mass.sum(axis=1)) >= threshold
    return filters, _normalized(filters @ mass) >= threshold


def threshold_for(mass: np.ndarray, keep_ratio: float) -> float:
    """The normalised threshold that keeps nearly keep_ratio * O * I of O * I blocks.

    Found by halving [0, 1], as though a higher threshold always kept fewer. Among the thresholds
    tried the one with the nearest count wins, and the higher one if two are equally near.
    """
    target = keep_ratio * mass.size

    def count(threshold: float) -> int:
        filters, channels = cut(mass, threshold)
        return int(filters.sum()) * int(channels.sum())

    low, high = 0.0, 1.0
    tried = {threshold: count(threshold) for threshold in (low, high)}
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried[middle] = count(middle)
        low, high = (middle, high) if tried[middle] > target else (low, middle)
    return min(tried, key=lambda threshold: (abs(tried[threshold] - target), -threshold))


def _normalized(scores: np.ndarray) -> np.ndarray:
    largest = scores.max(initial=0.0)
    return scores / largest if largest > 0 else np.zeros_like(scores)


def _cube(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """O, I and the product of the other dimensions; a tensor of one dimension or none is one column."""
    return (math.prod(shape), 1, 1) if len(shape) < 2 else (shape[0], shape[1], math.prod(shape[2:]))
