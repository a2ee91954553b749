"""One bit per entry: signs at one scale per tensor, 1-bit SGD with two means per group, and votes.

The two compressors are biased and remember nothing: wrap them in feedback.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from rayfl.compress import packed_bits
from rayfl.compress.base import Buffers, Packet, Quantizer, Tree, pack_bits, shapes_of
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.values import entries, entries_on_device, is_on_device
from rayfl.data.device import upload

ROUNDING = 2.0**-40
"""A generous bound on what rounding scales and means to float32 takes from a constant."""

NUMBERS = np.array([1, -1, 0, 0], np.float32)
"""The number that each code means; without ties only the first two codes occur."""


class SignCodec(WholeTensorCodec):
    """Reads "<name>.signs", one bit per entry in row order (1: negative), and "<name>.scale", one fp32."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        scale = parts[f"{name}.scale"]
        if not scale.any():
            return torch.zeros(size)
        numbers = np.unpackbits(parts[f"{name}.signs"], count=size).astype(np.uint32)
        numbers <<= np.uint32(31)
        numbers |= scale.view(np.uint32)
        return torch.from_numpy(numbers.view(np.float32))


class ScaledSign(Quantizer, on_device=True):
    """(||v||_1 / d) sign(v) of each tensor of d entries, with sign(0) = +1; zeros where the whole tensor is zero.

    A contraction with delta = ||v||_1^2 / (d ||v||_2^2) >= 1 / d. The constant holds if the scale is a normal float32
    (at least 2^-126) or zero. Bits: d, in whole bytes, and 32 per tensor.
    Source: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, section 4 and lemma 8; scale and sign after Bernstein et al., "signSGD", ICML 2018.
    """

    name = "sign"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Signs and scales of all tensors; draws nothing. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            flat = entries_on_device(name, tensor)
            parts[f"{name}.signs"] = _packed_bits(flat < 0) if is_on_device(flat) else pack_bits(flat < 0)
            parts[f"{name}.scale"] = _mean_magnitude(flat)
        return Packet(parts, SignCodec(shapes_of(x))), memory

    def delta(self, num_entries: int) -> float | None:
        """1 / d: all of the tensor's mass may be in one entry."""
        return (1 - ROUNDING) / max(1, num_entries)


class OneBitCodec(WholeTensorCodec):
    """Reads "<name>.signs", one bit per entry in row order (1: negative), and "<name>.means", fp32 [2 * num_groups].

    The first half of the means is that of the nonnegative entries of each group, the second that of the negative ones.
    """

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        num_groups, size = _groups(shape)
        upper, lower = parts[f"{name}.means"].reshape(2, num_groups, 1)
        negative = np.unpackbits(parts[f"{name}.signs"], count=num_groups * size).view(np.bool_)
        return torch.from_numpy(np.where(negative.reshape(num_groups, size), lower, upper))


class OneBit(Quantizer, on_device=True):
    """1-bit SGD: an entry becomes the mean of the entries of its sign (zero counts as positive) in its group.

    Groups are the paper's columns of a weight matrix, read as the entries that feed one output unit: the slices along
    the first dimension of tensors of two or more (torch's rows and filters); a tensor of one dimension or none is one
    group. A sign that does not occur in a group has mean 0. d bits, in whole bytes, and 64 per group.
    The projection on the vectors constant on each sign of each group, so a contraction with
    delta = sum of (n+ mu+^2 + n- mu-^2) / ||v||^2 >= 1 / d for groups of d entries, where the means are normal float32.
    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", Interspeech 2014, section 3.2. Its error feedback is the compressor feedback.
    """

    name = "onebit"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Signs and means of all groups; draws nothing. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            rows = entries(name, tensor).numpy().reshape(_groups(tuple(tensor.shape)))
            parts[f"{name}.signs"] = np.packbits(rows < 0)
            parts[f"{name}.means"] = _means(rows)
        return Packet(parts, OneBitCodec(shapes_of(x))), memory

    def delta(self, num_entries: int) -> float | None:
        """1 / d: all of a group's mass may be in one of d entries of the same sign, the others zero."""
        return (1 - ROUNDING) / max(1, num_entries)


@dataclass(frozen=True)
class VotesCodec(WholeTensorCodec):
    """Reads signs without a scale, one buffer a tensor, under its name: +1, -1 and, in two bits, 0 (a tied vote)."""

    width: int

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(NUMBERS[packed_bits.unpack(parts[name], self.width, math.prod(shape))])


def votes_packet(x: Tree, ties: bool = False) -> Packet:
    """The signs of all entries, sign(0) = +1, in d bits; with `ties` sign(0) = 0 and 2d bits. Whole bytes per tensor.

    Decodes to float32. ValueError on NaN and infinity.
    """
    width = 2 if ties else 1
    parts = {}
    for name, tensor in x.items():
        flat = entries(name, tensor).numpy()
        codes = (flat < 0).astype(np.uint8)
        if ties:
            codes |= (flat == 0).astype(np.uint8) << 1
        parts[name] = packed_bits.pack(codes, width)
    return Packet(parts, VotesCodec(shapes_of(x), width))


def _mean_magnitude(flat: torch.Tensor) -> np.ndarray:
    """float32 [1]: the mean of |entries|; [0] where there are none.

    A GPU adds in another order than numpy. So its sum is used only if every order of additions gives the same float32;
    otherwise numpy adds. By Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2, two orders of n
    additions of numbers of one sign differ by less than 2 n u / (1 - n u), u = 2^-53.
    """
    if is_on_device(flat) and flat.numel():
        margin = (flat.numel() + 4) * 2.0**-52 * (1 + 2.0**-20)
        total = flat.abs().sum(dtype=torch.float64).item()
        low, high = (np.float32(total * factor / flat.numel()) for factor in (1 - margin, 1 + margin))
        if low == high:
            return np.array([low])
    magnitudes = np.abs(flat.cpu().numpy())
    return np.array([magnitudes.mean(dtype=np.float64)] if magnitudes.size else [], np.float32)


def _packed_bits(mask: torch.Tensor) -> np.ndarray:
    """`tree.pack_bits`, computed on the device of the boolean tensor."""
    flat = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8))
    weights = upload(np.array([128, 64, 32, 16, 8, 4, 2, 1], np.uint8), flat.device)
    return (flat.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8).cpu().numpy()


def _means(rows: np.ndarray) -> np.ndarray:
    """float32 [2 * num_groups]: of each group [num_groups, size] the means of its nonnegative and negative entries."""
    num_negative = np.count_nonzero(rows < 0, axis=1)
    lower = np.minimum(rows, 0).sum(axis=1, dtype=np.float64) / np.maximum(num_negative, 1)
    upper = np.maximum(rows, 0).sum(axis=1, dtype=np.float64) / np.maximum(rows.shape[1] - num_negative, 1)
    return np.concatenate([upper, lower]).astype(np.float32)


def _groups(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of groups and entries in each; a tensor without entries has no group."""
    size = math.prod(shape)
    num_groups = min(size, 1) if len(shape) < 2 else min(size, shape[0])
    return num_groups, size // max(num_groups, 1)
