"""Sparse ternary compression: the largest entries by magnitude, each sent as a sign, with one magnitude for all."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rayfl.compress.base import Buffers, Packet, Tree, entries, shapes_of
from rayfl.compress.codecs import PositionedCodec
from rayfl.compress.golomb import decode_golomb, encode_golomb, low_bits
from rayfl.compress.largest import top_k_positions
from rayfl.compress.sign import ROUNDING
from rayfl.compress.sparse import KeptShare, Scope, kept_entries, sizes_of


@dataclass(frozen=True)
class TernaryCodec(PositionedCodec):
    """Reads for every run of entries "<run>.mean" (fp32), "<run>.signs" (1: negative) and "<run>.positions" (Golomb).

    A run is a tensor, or with scope "model" all entries, of the empty name. It has k nonzeros, which both ends know;
    if there are fewer, "<run>.count" (int32) is their number.
    """

    keep_ratio: float
    scope: Scope

    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        sizes = sizes_of(self.shapes)
        if self.scope == "tensor":
            for name, size in sizes.items():
                positions, values = self._run(parts, name, size)
                yield name, torch.from_numpy(positions), torch.from_numpy(values)
            return
        positions, values = self._run(parts, "", sum(sizes.values()))
        starts = [0, *itertools.accumulate(sizes.values())]
        cuts = np.searchsorted(positions, starts)
        for name, start, first, last in zip(sizes, starts, cuts, cuts[1:], strict=False):
            yield name, torch.from_numpy(positions[first:last] - start), torch.from_numpy(values[first:last])

    def num_values(self, parts: Buffers) -> int:
        """See `Codec`: the nonzeros, each of which has a sign."""
        sizes = sizes_of(self.shapes)
        runs = sizes if self.scope == "tensor" else {"": sum(sizes.values())}
        return sum(self._count(parts, name, size) for name, size in runs.items())

    def _count(self, parts: Buffers, name: str, size: int) -> int:
        """The number of nonzeros in a run of `size` entries."""
        count_buffer = parts.get(f"{name}.count")
        return kept_entries(size, self.keep_ratio) if count_buffer is None else int(count_buffer[0])

    def _run(self, parts: Buffers, name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        count = self._count(parts, name, size)
        if count == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        positions = decode_golomb(parts[f"{name}.positions"], size, count, low_bits(self.keep_ratio))
        negative = np.unpackbits(parts[f"{name}.signs"], count=count).view(np.bool_)
        mean = parts[f"{name}.mean"]
        return positions, np.where(negative, -mean, mean)


class Ternary(KeptShare, on_device=True):
    """mu sign(v) on the k entries of largest magnitude, ties to the lowest index; mu is the mean of those magnitudes.

    Of `keep_ratio` p and n entries k = kept_entries(n, p); zeros among the k stay zero. `scope`: k and mu of each
    tensor or of the whole tree. Bits, each term in whole bytes: 32 for mu, k signs, and the Golomb code of k positions
    with `low_bits(p)`, none of them where all entries are sent; 32 more where fewer than k entries are nonzero.
    ||C(v) - v||^2 = (1 - delta) ||v||^2 with delta = k mu^2 / ||v||^2 exactly, except for the rounding of mu (and zeros
    among the k, which can only help). Biased: wrap it in feedback.
    Source: Sattler, Wiedemann, Mueller, Samek, "Robust and Communication-Efficient Federated Learning from Non-i.i.d.
    Data", IEEE TNNLS 2019, Algorithm 1. Their keep_ratio is 1/400; 0.1 is that of FedPSE's comparison.
    """

    name = "stc"
    scope: Scope = "tensor"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Means, signs and positions; draws nothing. ValueError on NaN and infinity."""
        runs = {name: entries(name, tensor) for name, tensor in x.items()}
        if self.scope == "model" and runs:
            runs = {"": torch.cat(list(runs.values()))}
        parts = {}
        for name, flat in runs.items():
            parts |= self._parts(name, flat)
        return Packet(parts, TernaryCodec(shapes_of(x), self.keep_ratio, self.scope)), memory

    def _parts(self, name: str, flat: torch.Tensor) -> dict[str, np.ndarray]:
        k = kept_entries(flat.numel(), self.keep_ratio)
        if k == 0:
            return {}
        numbers = flat.numpy()
        positions = top_k_positions(numbers, k)
        chosen = numbers[positions]
        parts: dict[str, np.ndarray] = {f"{name}.mean": np.array([np.abs(chosen).mean(dtype=np.float64)], np.float32)}
        if not chosen.all():
            positions, chosen = positions[chosen != 0], chosen[chosen != 0]
            parts[f"{name}.count"] = np.array([chosen.size], np.int32)
        parts[f"{name}.signs"] = np.packbits(chosen < 0)
        parts[f"{name}.positions"] = encode_golomb(positions, flat.numel(), low_bits(self.keep_ratio))
        return parts

    def delta(self, num_entries: int) -> float | None:
        """min(k / n, 1 / k): all entries are equal, or all but one are zero; where mu is a normal float32.

        Why: for given smallest of the k magnitudes, c, and given sum S of them, k mu^2 = S^2 / k is fixed, and ||v||^2
        is largest with one entry x and k - 1 times c among the k, and c outside. (x + (k - 1) c)^2 / (k (x^2 +
        (n - 1) c^2)) first rises and then falls in x / c, from k / n at 1 to 1 / k at infinity.
        """
        if num_entries == 0:
            return None
        k = kept_entries(num_entries, self.keep_ratio)
        kept = k / num_entries if self.scope == "model" else max(1 / num_entries, self.keep_ratio - 1e-9)
        return min(kept, 1 / k) * (1 - ROUNDING)
