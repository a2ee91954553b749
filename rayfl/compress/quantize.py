"""Quantisers that round at random to s levels of a norm: (p, s)-quantisation, and with it QSGD and TernGrad.

A bucket v [d] with norm N = ||v||_p is sent as N, signs and levels: of x = s |v_i| / N the level is
l = min(floor(x), s - 1), or l + 1 with probability x - l; the receiver sees N * sign(v_i) * level / s. The expectation
is v_i because the same N divides and multiplies, whatever it is, as long as no |v_i| exceeds it: so N may be rounded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from rayfl.compress import packed_bits
from rayfl.compress.base import Buffers, Field, Packet, Quantizer, Tree, entries, shapes_of
from rayfl.compress.codecs import WholeTensorCodec

Norm = Literal["1", "2", "inf"]
Coding = Literal["fixed", "elias"]
Levels = Annotated[
    int, Field(ge=1, le=2 ** (packed_bits.MAX_WIDTH - 1) - 1, description="levels s between 0 and the norm")
]
Bucket = Annotated[int, Field(ge=0, description="entries that share a norm; 0: the whole tensor")]

FIXED_POINT_BITS = 31
"""Bits of the fixed-point x; the fraction takes those that the levels leave. Its truncation is below N 2^-30."""

CHUNK = 1 << 17
"""Entries worked on at a time, so that they fit into the processor's cache."""

LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL, SMALLEST = 2.0**-126, 2.0**-149


@dataclass(frozen=True)
class QuantizeCodec(WholeTensorCodec):
    """Reads "<name>.norms" (fp32, one a bucket) and the signed levels of a tensor.

    Coding "fixed": "<name>.levels", 1 + ceil(log2(s + 1)) bits per entry, the sign above the level. "trits": the same
    name, level + 1 as ternary digits (s = 1). "elias": "<name>.prefixes" and "<name>.digits", the gamma codes of the
    distances between nonzero levels and then of these levels without sign, and "<name>.signs", one bit each.
    """

    levels: int
    bucket: int
    coding: Literal["fixed", "elias", "trits"]

    def write(self, name: str, norms: np.ndarray, levels: np.ndarray) -> dict[str, np.ndarray]:
        """The buffers of one tensor: norms [num_buckets] and signed levels [n], int8 or int16."""
        parts = {f"{name}.norms": norms}
        if self.coding == "elias":
            sent = np.flatnonzero(levels)
            chosen = levels[sent].astype(np.int64)
            numbers = np.concatenate([np.diff(sent, prepend=-1), np.abs(chosen)])
            parts[f"{name}.prefixes"], parts[f"{name}.digits"] = packed_bits.encode_gamma(numbers)
            parts[f"{name}.signs"] = np.packbits(chosen < 0)
        elif self.coding == "trits":
            parts[f"{name}.levels"] = packed_bits.pack_trits((levels + np.int8(1)).view(np.uint8))
        else:
            codes = np.abs(levels).view(np.uint8 if levels.dtype == np.int8 else np.uint16)
            codes |= (levels < 0).astype(codes.dtype) << self.levels.bit_length()
            parts[f"{name}.levels"] = packed_bits.pack(codes, 1 + self.levels.bit_length())
        return parts

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        norms = parts[f"{name}.norms"]
        levels = self._read_levels(parts, name, size)
        decoded = np.empty(size, np.float32)
        for piece, buckets in _pieces(size, self.bucket):
            # level / s comes first: it is at most 1, so that no product overflows, and s / s is exactly 1.
            values = decoded[piece].reshape(buckets.stop - buckets.start, -1)
            np.divide(levels[piece].reshape(values.shape), np.float32(self.levels), out=values)
            values *= norms[buckets, None]
        return torch.from_numpy(decoded)

    def _read_levels(self, parts: Buffers, name: str, size: int) -> np.ndarray:
        """Signed levels [size], int8 or int16."""
        if self.coding == "elias":
            gaps, magnitudes = np.split(packed_bits.decode_gamma(parts[f"{name}.prefixes"], parts[f"{name}.digits"]), 2)
            negative = np.unpackbits(parts[f"{name}.signs"], count=gaps.size).view(np.bool_)
            levels = np.zeros(size, _level_type(self.levels))
            levels[np.cumsum(gaps) - 1] = np.where(negative, -magnitudes, magnitudes)
            return levels
        if self.coding == "trits":
            return packed_bits.unpack_trits(parts[f"{name}.levels"], size).view(np.int8) - np.int8(1)
        width = self.levels.bit_length()
        codes = packed_bits.unpack(parts[f"{name}.levels"], 1 + width, size)
        levels = (codes & ((1 << width) - 1)).view(np.int8 if codes.dtype == np.uint8 else np.int16)
        levels *= 1 - 2 * (codes >> width).view(levels.dtype)
        return levels


class Quantize(Quantizer, on_device=True):
    """(p, s)-quantisation: every entry at random to one of s levels of its bucket's p-norm. Unbiased, see `omega`.

    `norm`: p; `levels`: s >= 1; `bucket`: entries that share a norm, in row order (0: the whole tensor), fewer in the
    last bucket of a tensor; `coding`: "fixed" with 1 + ceil(log2(s + 1)) bits per entry, rounded up to whole bytes per
    tensor, or "elias", with bits for nonzero levels only (their distance, sign and level); each norm takes 32 bits.

    Range: a norm too large for float32 is sent as the largest float32, and one below 2^-126 is rounded up so that N / s
    is a multiple of 2^-149; both stay unbiased. The constant holds for buckets of norm zero, or at least 2^-126.
    Sources: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017, section 3.1 (its Elias codes are omega; ours are gamma, distances run over the tensor);
    Horvath et al., "Natural Compression for Distributed Deep Learning", MSML 2022 (other norms).
    """

    name = "quantize"
    norm: Norm = Field(default="2", description="norm p of a bucket")
    levels: Levels = 7
    bucket: Bucket = 512
    coding: Coding = Field(
        default="fixed", description="fixed: equal bits per entry; elias: bits for nonzero levels only"
    )

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Norms and random levels of all buckets. ValueError on NaN and infinity."""
        flats = {name: entries(name, tensor).numpy() for name, tensor in x.items()}
        codec = QuantizeCodec(shapes_of(x), self.levels, self.bucket, self.coding)
        return _packet(flats, self.norm, codec, generator), memory

    def omega(self, num_entries: int) -> float | None:
        """The largest over possible buckets, which is that of the longest one, d = min(bucket, num_entries).

        p = 2: min(d / s^2, sqrt(d) / s), and for s = 1 exactly sqrt(d) - 1. p = inf: exactly
        (sqrt(1 + (d - 1) / s^2) - 1) / 2. p = 1: d min(d / (4 s^2), 1 / s), and for s = 1 exactly d - 1.
        """
        length = max(1, min(self.bucket, num_entries) if self.bucket else num_entries)
        return _omega(self.norm, self.levels, length)


class QSGD(Quantize, on_device=True):
    """Quantisation with the 2-norm: `Quantize(norm="2")` with the bucket of 512 and the 4 bits of the paper.

    Four bits are a sign and a level of s = 7. Unbiased, omega = min(d / s^2, sqrt(d) / s) for buckets of d entries.
    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017, section 3.1.
    """

    name = "qsgd"
    norm: ClassVar[Norm] = "2"  # pyright: ignore[reportIncompatibleVariableOverride]


class TernGrad(Quantizer, on_device=True):
    """m * sign(v_i) with probability |v_i| / m, else 0, with m = max |v| of each tensor: one level of the inf norm.

    Bits: 32 and five ternary digits a byte, 8 ceil(d / 5). Unbiased, omega = (sqrt(d) - 1) / 2: E||C||^2 = m ||v||_1.
    `clip`: c > 0 first clips entries to c standard deviations of their tensor (the paper's 2.5), which is biased, so
    that no constant holds; 0 does not clip. A tensor of equal entries has no deviation and is not clipped.
    Source: Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning", NeurIPS 2017, sections 3.1 and 3.3. Each sender has its own m (the paper may share the largest).
    """

    name = "terngrad"
    clip: float = Field(default=0.0, ge=0, description="standard deviations to which entries are clipped; 0: none")

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The largest magnitude and the random digits of each tensor. ValueError on NaN and infinity."""
        flats = {name: entries(name, tensor).numpy() for name, tensor in x.items()}
        if self.clip:
            flats = {name: _clipped(flat, self.clip) for name, flat in flats.items()}
        return _packet(flats, "inf", QuantizeCodec(shapes_of(x), 1, 0, "trits"), generator), memory

    def omega(self, num_entries: int) -> float | None:
        """(sqrt(d) - 1) / 2 for d entries in one tensor, the worst way to divide them; None with clipping."""
        return None if self.clip else _omega("inf", 1, max(1, num_entries))


def _packet(flats: Buffers, norm: Norm, codec: QuantizeCodec, generator: np.random.Generator) -> Packet:
    parts = {}
    for name, flat in flats.items():
        norms = _norms(flat, norm, codec.levels, codec.bucket)
        levels = _levels(flat, norms, codec.levels, codec.bucket, generator)
        parts |= codec.write(name, norms, levels)
    return Packet(parts, codec)


def _omega(norm: Norm, s: int, d: int) -> float:
    """One entry's error is at most N^2 / (4 s^2), and all errors at most N ||v||_1 / s, less ||v||^2 where s = 1.

    For p = inf one entry is N and the worst others are equal: omega solves omega^2 + omega = (d - 1) / (4 s^2).
    """
    if norm == "inf":
        return (math.sqrt(1 + (d - 1) / s**2) - 1) / 2
    largest = {"1": d, "2": math.sqrt(d)}[norm]
    if s == 1:
        return largest - 1.0
    return min(d / s**2, math.sqrt(d) / s) if norm == "2" else min(d**2 / (4 * s**2), d / s)


def _pieces(size: int, bucket: int) -> Iterator[tuple[slice, slice]]:
    """Runs of entries to work on at a time, each with its buckets: several whole buckets, or a part of one."""
    bucket = bucket or size
    step = CHUNK // bucket * bucket if 0 < bucket <= CHUNK else CHUNK
    start = 0
    while start < size:
        first = start // bucket
        stop = min(start + step, size, (first + 1) * bucket if bucket > CHUNK else size)
        if (stop - start) > bucket:
            stop -= stop % bucket
        yield slice(start, stop), slice(first, -(-stop // bucket))
        start = stop


def _norms(flat: np.ndarray, norm: Norm, levels: int, bucket: int) -> np.ndarray:
    """float32 norms [num_buckets], none of them below an entry of its bucket.

    In float64 no square of a float32 overflows or vanishes. Sums, square roots and roundings are monotone, and those of
    a single entry are exact, so no norm falls below its largest entry on the way.
    """
    norms = np.zeros(-(-flat.size // (bucket or flat.size)) if flat.size else 0)
    for piece, buckets in _pieces(flat.size, bucket):
        rows = flat[piece].reshape(buckets.stop - buckets.start, -1)
        if norm == "inf":
            np.maximum(norms[buckets], np.maximum(rows.max(axis=1), -rows.min(axis=1)), out=norms[buckets])
        elif norm == "1":
            norms[buckets] += np.abs(rows).sum(axis=1, dtype=np.float64)
        else:
            wide = rows.astype(np.float64)
            norms[buckets] += np.einsum("ij,ij->i", wide, wide)
    if norm == "2":
        norms = np.sqrt(norms)
    tiny = norms < SMALLEST_NORMAL
    norms[tiny] = np.ceil(norms[tiny] / (levels * SMALLEST)) * (levels * SMALLEST)
    return np.minimum(norms, LARGEST).astype(np.float32)


def _levels(
    flat: np.ndarray, norms: np.ndarray, levels: int, bucket: int, generator: np.random.Generator
) -> np.ndarray:
    """Random signed levels [n], int8 or int16: the integer part of fixed-point x + u, with u uniform in [0, 1)."""
    fraction_bits = FIXED_POINT_BITS - levels.bit_length()
    divisors = np.where(norms > 0, norms, np.float32(1))[:, None]
    chosen = np.empty(flat.size, _level_type(levels))
    for piece, buckets in _pieces(flat.size, bucket):
        rows = flat[piece].reshape(buckets.stop - buckets.start, -1)
        # |v| / N is at most 1 even when rounded, so x is at most s, and x + u below s + 1: no level exceeds s.
        x = np.abs(rows)
        x /= divisors[buckets]
        x *= np.float32(levels * 2.0**fraction_bits)
        fixed = x.astype(np.int32).reshape(-1)
        draws = packed_bits.random_bits(fixed.size, generator)
        draws >>= np.uint32(32 - fraction_bits)
        fixed += draws.view(np.int32)
        fixed >>= fraction_bits
        x[...] = fixed.reshape(x.shape)
        np.copysign(x, rows, out=x)
        chosen[piece] = x.reshape(-1)
    return chosen


def _level_type(levels: int) -> type[np.signedinteger]:
    return np.int8 if levels < 2**7 else np.int16


def _clipped(flat: np.ndarray, clip: float) -> np.ndarray:
    """`flat` with entries beyond `clip` standard deviations of all of them brought back to that bound."""
    bound = clip * float(flat.std(dtype=np.float64)) if flat.size else 0.0
    return np.clip(flat, np.float32(-bound), np.float32(bound)) if 0 < bound < LARGEST else flat
