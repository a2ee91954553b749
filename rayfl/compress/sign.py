"""One bit an entry: signs at one scale a tensor, and 1-bit SGD with two means a group.

Both are biased and remember nothing: wrap them in feedback.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rayfl.compress import on_gpu
from rayfl.compress.base import Packet, Quantizer, Shapes, WholeTensorCodec, shapes_of
from rayfl.compress.values import BUFFER_TYPES, BYTES, buffer_of, entries
from rayfl.tree import Tree

ROUNDING = 2.0**-40
"""A generous bound on what rounding scales and means to float32 takes from a constant."""


@dataclass(frozen=True)
class SignCodec(WholeTensorCodec):
    """Reads "<name>.signs", a bit an entry in row order (1: negative), and "<name>.scale", one fp32."""

    shapes: Shapes

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        return {name: self._read(parts, name, math.prod(shape)).view(shape) for name, shape in self.shapes}

    def _read(self, parts: Mapping[str, np.ndarray], name: str, size: int) -> Tensor:
        """The decoded entries [size] of one tensor, float32."""
        scale = buffer_of(parts, f"{name}.scale", BUFFER_TYPES["fp32"], min(1, size))
        signs = buffer_of(parts, f"{name}.signs", BYTES, -(-size // 8))
        if not scale.any():
            return torch.zeros(size)
        numbers = np.unpackbits(signs, count=size).astype(np.uint32)
        numbers <<= np.uint32(31)
        numbers |= scale.view(np.uint32)
        return torch.from_numpy(numbers.view(np.float32))


class ScaledSign(Quantizer):
    """(||v||_1 / d) sign(v) of each tensor of d entries, with sign(0) = +1; zeros where the whole tensor is zero.

    A contraction with delta = ||v||_1^2 / (d ||v||_2^2) >= 1 / d; d bits, in whole bytes, and 32 a tensor. The constant
    holds where the scale is a normal float32 (at least 2^-126) or zero.
    Source: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, section 4 and lemma 8; scale and sign after Bernstein et al., "signSGD", ICML 2018.
    """

    name: ClassVar[str] = "sign"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Signs and scales of all tensors; draws nothing. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            flat = entries(name, tensor, where_it_lies=True)
            parts[f"{name}.signs"] = on_gpu.bits_of(flat < 0)
            parts[f"{name}.scale"] = _mean_magnitude(flat)
        return Packet(parts, SignCodec(shapes_of(x))), memory

    def delta(self, num_entries: int) -> float | None:
        """1 / d: all of the tensor's mass may be in one entry."""
        return (1 - ROUNDING) / max(1, num_entries)


@dataclass(frozen=True)
class OneBitCodec(WholeTensorCodec):
    """Reads "<name>.signs", a bit an entry in row order (1: negative), and "<name>.means", fp32 [2 * num_groups].

    The first half of the means is that of the nonnegative entries of each group, the second that of the negative ones.
    """

    shapes: Shapes

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        decoded = {}
        for name, shape in self.shapes:
            num_groups, size = _groups(shape)
            means = buffer_of(parts, f"{name}.means", BUFFER_TYPES["fp32"], 2 * num_groups)
            signs = buffer_of(parts, f"{name}.signs", BYTES, -(-num_groups * size // 8))
            upper, lower = means.reshape(2, num_groups, 1)
            negative = np.unpackbits(signs, count=num_groups * size).view(np.bool_)
            numbers = np.where(negative.reshape(num_groups, size), lower, upper)
            decoded[name] = torch.from_numpy(numbers).view(shape)
        return decoded


class OneBit(Quantizer):
    """1-bit SGD: an entry becomes the mean of the entries of its sign (zero counts as positive) in its group.

    Groups are the paper's columns of a weight matrix, read as the entries that feed one output unit: the slices along
    the first dimension of tensors of two or more (torch's rows and filters); a tensor of one dimension or none is one
    group. A sign that does not occur in a group has mean 0. d bits, in whole bytes, and 64 a group.
    The projection on the vectors constant on each sign of each group, so a contraction with
    delta = sum of (n+ mu+^2 + n- mu-^2) / ||v||^2 >= 1 / d for groups of d entries, where the means are normal float32.
    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", Interspeech 2014, section 3.2. Its error feedback is the compressor feedback.
    """

    name: ClassVar[str] = "onebit"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Signs and means of all groups; draws nothing. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            rows = entries(name, tensor, where_it_lies=True).view(_groups(tuple(tensor.shape)))
            parts[f"{name}.signs"] = on_gpu.bits_of(rows < 0)
            parts[f"{name}.means"] = _means(rows)
        return Packet(parts, OneBitCodec(shapes_of(x))), memory

    def delta(self, num_entries: int) -> float | None:
        """1 / d: all of a group's mass may be in one of d entries of the same sign, the others zero."""
        return (1 - ROUNDING) / max(1, num_entries)


def _mean_magnitude(flat: Tensor) -> np.ndarray:
    """float32 [1]: the mean of |entries|; [0] where there are none."""
    if on_gpu.on_gpu(flat) and flat.numel():
        sums = flat.abs().sum(dtype=torch.float64).view(1)
        found = on_gpu.rounded(sums, flat.numel(), lambda each: (each / flat.numel()).astype(np.float32))
        if found is not None:
            return found
    magnitudes = np.abs(flat.cpu().numpy())
    return np.array([magnitudes.mean(dtype=np.float64)] if magnitudes.size else [], np.float32)


def _means(rows: Tensor) -> np.ndarray:
    """float32 [2 * num_groups]: of each group [num_groups, size] the means of its nonnegative and negative entries."""
    size = rows.shape[1]
    if on_gpu.on_gpu(rows):
        num_negative = (rows < 0).sum(dim=1).cpu().numpy()
        sums = torch.cat([part.sum(dim=1, dtype=torch.float64) for part in (rows.clamp(min=0), rows.clamp(max=0))])
        counts = np.maximum(np.concatenate([size - num_negative, num_negative]), 1)
        found = on_gpu.rounded(sums, size, lambda each: (each / counts).astype(np.float32))
        if found is not None:
            return found
    numbers = rows.cpu().numpy()
    num_negative = np.count_nonzero(numbers < 0, axis=1)
    lower = np.minimum(numbers, 0).sum(axis=1, dtype=np.float64) / np.maximum(num_negative, 1)
    upper = np.maximum(numbers, 0).sum(axis=1, dtype=np.float64) / np.maximum(size - num_negative, 1)
    return np.concatenate([upper, lower]).astype(np.float32)


def _groups(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of groups and entries in each; a tensor without entries has no group."""
    size = math.prod(shape)
    num_groups = min(size, 1) if len(shape) < 2 else min(size, shape[0])
    return num_groups, size // max(num_groups, 1)
