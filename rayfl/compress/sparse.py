"""Sparse packets: values at positions. TopK chooses the positions by magnitude, a method may choose them itself."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import field_validator
from torch import Tensor

from rayfl.compress.base import Compressor, Packet, Shapes, shapes_of, zeros_of
from rayfl.compress.positions import decode_positions, encode_positions
from rayfl.compress.values import UNIT_ROUNDOFF, ValueType, decode_values, encode_values, entries
from rayfl.tree import Tree

Scope = Literal["tensor", "model"]

SAMPLE_SIZE = 1 << 16


@dataclass(frozen=True)
class SparseCodec:
    """Reads two buffers a tensor: "<name>.values" and "<name>.positions" (see positions.py)."""

    shapes: Shapes
    dtype: ValueType

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        decoded = zeros_of(self.shapes)
        for name, tensor in decoded.items():
            positions, values = self._read(parts, name, tensor.numel())
            tensor.view(-1).scatter_(0, positions, values)
        return decoded

    def support(self, parts: Mapping[str, np.ndarray]) -> Tree:
        masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.shapes}
        for name, mask in masks.items():
            mask.view(-1)[self._read(parts, name, mask.numel())[0]] = True
        return masks

    def add_to(self, parts: Mapping[str, np.ndarray], total: Tree, weight: float) -> None:
        """Adds at the sent positions only; every tensor of `total` must be contiguous."""
        for name, tensor in total.items():
            positions, values = self._read(parts, name, tensor.numel())
            tensor.view(-1).index_add_(0, positions.to(tensor.device), (values * weight).to(tensor))

    def _read(self, parts: Mapping[str, np.ndarray], name: str, size: int) -> tuple[Tensor, Tensor]:
        """int64 positions [count] and float32 values [count] of one tensor."""
        values = decode_values(parts[f"{name}.values"], self.dtype)
        positions = decode_positions(parts[f"{name}.positions"], size, values.numel())
        return torch.from_numpy(positions), values


def sparse_packet(values: Tree, support: Tree, dtype: ValueType = "fp32") -> Packet:
    """The packet of `values` where the boolean tree `support` is True; zeros inside the support are sent too.

    ValueError on NaN or infinity anywhere in `values`, and where `support` does not fit.
    """
    flats = {name: entries(name, tensor) for name, tensor in values.items()}
    positions = {}
    for name, tensor in values.items():
        mask = support.get(name)
        if mask is None or mask.dtype != torch.bool or mask.shape != tensor.shape:
            given = "missing" if mask is None else f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise ValueError(f"support of {name!r} is {given}; it must be bool of shape {tuple(tensor.shape)}")
        positions[name] = np.flatnonzero(mask.cpu().numpy())
    return _packet(flats, positions, shapes_of(values), dtype)


def top_k_support(x: Tree, keep_ratio: float, scope: Scope = "tensor") -> Tree:
    """Boolean tree with exactly k True: the largest magnitudes, ties to the lowest flat index.

    k = max(1, ceil(keep_ratio * n - 1e-9)) of the n entries of each tensor (scope "tensor") or of the whole tree in
    its order (scope "model"). Where fewer than k entries are nonzero, zeros of lowest index fill up to k.
    """
    flats = {name: entries(name, tensor) for name, tensor in x.items()}
    support = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in x.items()}
    for name, positions in _top_k(flats, keep_ratio, scope).items():
        support[name].view(-1)[torch.from_numpy(positions)] = True
    return support


def kept_entries(num_entries: int, keep_ratio: float) -> int:
    """k of n: max(1, ceil(keep_ratio * n - 1e-9)), 0 for n = 0. The 1e-9: 1 - 0.7 is 0.30000000000000004 in floats."""
    return min(num_entries, max(1, math.ceil(keep_ratio * num_entries - 1e-9)))


def top_k_positions(x: np.ndarray, k: int) -> np.ndarray:
    """Increasing int64 positions [k] of the k largest |x| of finite float32 `x` [n], ties to the lowest position."""
    if k >= x.size:
        return np.arange(x.size)
    if k == 0:
        return np.empty(0, np.int64)
    candidates = _candidates(x, k)
    magnitudes = np.abs(x[candidates])
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    keep = magnitudes >= threshold
    surplus = int(np.count_nonzero(keep)) - k
    if surplus:
        tied = np.flatnonzero(magnitudes == threshold)
        keep[tied[tied.size - surplus :]] = False
    return candidates[keep]


class TopK(Compressor):
    """The k entries of largest magnitude, exactly, ties to the lowest index; float64 input is sent as float32.

    `keep_ratio`: k / n, in (0, 1]; `scope`: k of each tensor or of the whole tree; `values`: their type on the wire.
    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    name: ClassVar[str] = "topk"
    keep_ratio: float = 0.1
    scope: Scope = "tensor"
    values: ValueType = "fp32"

    @field_validator("keep_ratio")
    @classmethod
    def _in_range(cls, ratio: float) -> float:
        if not 0 < ratio <= 1:
            raise ValueError(f"keep_ratio={ratio} is outside (0, 1]; use dense to send everything")
        return ratio

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Values and positions of the largest entries. ValueError on NaN, infinity, or values too large for fp16."""
        flats = {name: entries(name, tensor) for name, tensor in x.items()}
        return _packet(flats, _top_k(flats, self.keep_ratio, self.scope), shapes_of(x), self.values), memory

    def delta(self, num_entries: int) -> float | None:
        """(1 - u^2) k / n with unit roundoff u of `values`; over single tensors k / n is at least `keep_ratio`."""
        if self.values not in UNIT_ROUNDOFF or num_entries == 0:
            return None
        kept = kept_entries(num_entries, self.keep_ratio) / num_entries
        if self.scope == "tensor":
            kept = max(1 / num_entries, self.keep_ratio - 1e-9)
        return kept * (1 - UNIT_ROUNDOFF[self.values] ** 2)


def _packet(flats: Tree, positions: Mapping[str, np.ndarray], shapes: Shapes, dtype: ValueType) -> Packet:
    parts = {}
    for name, flat in flats.items():
        chosen = torch.from_numpy(flat.numpy()[positions[name]])
        parts[f"{name}.values"] = encode_values(name, chosen, dtype)
        parts[f"{name}.positions"] = encode_positions(positions[name], flat.numel())
    return Packet(parts, SparseCodec(shapes, dtype))


def _top_k(flats: Tree, keep_ratio: float, scope: Scope) -> dict[str, np.ndarray]:
    """Positions of the kept entries of each flat tensor."""
    arrays = {name: flat.numpy() for name, flat in flats.items()}
    if scope == "tensor":
        return {name: top_k_positions(array, kept_entries(array.size, keep_ratio)) for name, array in arrays.items()}
    if not arrays:
        return {}
    whole = np.concatenate(list(arrays.values()))
    positions = top_k_positions(whole, kept_entries(whole.size, keep_ratio))
    starts = [0, *itertools.accumulate(array.size for array in arrays.values())]
    pieces = np.split(positions, np.searchsorted(positions, starts[1:-1]))
    return {name: piece - start for name, piece, start in zip(arrays, pieces, starts, strict=False)}


def _candidates(x: np.ndarray, k: int) -> np.ndarray:
    """Positions of all entries above a magnitude that at least k reach: what can be among the k largest.

    The magnitude is guessed from every few entries, four standard deviations on the safe side, so that the exact
    selection works on little more than k entries; where the guess fails all positions are candidates.
    """
    if x.size < 4 * SAMPLE_SIZE:
        return np.arange(x.size)
    sample = np.abs(x[:: x.size // SAMPLE_SIZE])
    expected = k * sample.size / x.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= sample.size:
        return np.arange(x.size)
    low = np.partition(sample, sample.size - rank)[sample.size - rank]
    candidates = np.flatnonzero(np.abs(x) >= low)
    return candidates if candidates.size >= k else np.arange(x.size)
