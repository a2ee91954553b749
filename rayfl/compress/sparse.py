"""Sparse packets: values and their positions, which a Sparsifier or a method chooses."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal, Self

import numpy as np
import torch

from rayfl.compress.base import (
    PIECE,
    Buffers,
    Compressor,
    Field,
    Packet,
    RayflError,
    Shapes,
    Tree,
    masks_of,
    shapes_of,
)
from rayfl.compress.codecs import PositionedCodec
from rayfl.compress.largest import top_k_of_each, top_k_positions
from rayfl.compress.positions import (
    cut_positions,
    decode_mask,
    decode_positions,
    encode_positions,
)
from rayfl.compress.values import (
    UNIT_ROUNDOFF,
    ValueType,
    decode_values,
    encode_values,
    entries,
    entries_on_device,
    is_on_device,
    scaled,
    unchecked,
)
from rayfl.data.device import download

Scope = Annotated[
    Literal["tensor", "model"], Field(description="tensor: k of each tensor; model: k of the whole model")
]

SEED = "seed"
"""Name of the buffer of a shared seed; buffers of a tensor have a dot in their names."""


KeepRatio = Annotated[float, Field(gt=0, le=1, description="share of the entries that is sent, k / n, in (0, 1]")]

Draw = Callable[[int, Mapping[str, int]], dict[str, np.ndarray]]
"""Draws random positions at both ends: from a shared seed and the tensors' numbers of entries, increasing int64
positions in each tensor. A dataclass of settings that both ends know, so that it pickles."""


@dataclass(frozen=True)
class SelectedEntries:
    """The entries to send: increasing int64 `positions` in each tensor, and `scales` of the values (1 if absent).

    With `draw`, which gives the same positions from `seed`, uint64 [1], the seed is sent instead of the positions.
    """

    positions: Buffers
    scales: Mapping[str, float] = field(default_factory=dict)
    seed: np.ndarray | None = None
    draw: Draw | None = None

    def values(self, flats: Tree) -> Tree:
        """The kept entries [count] of each flat tensor, times its scale. Raise RayflError where that is beyond
        float32."""
        kept = {name: torch.from_numpy(flat.numpy()[self.positions[name]]) for name, flat in flats.items()}
        return {name: scaled(name, tensor, self.scales.get(name, 1.0)) for name, tensor in kept.items()}


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """Number of entries of each tensor."""
    return {name: math.prod(shape) for name, shape in shapes}


@dataclass(frozen=True)
class SparseCodec(PositionedCodec):
    """Reads "<name>.values" and "<name>.positions" (see positions.py) of each tensor; with `draw` a seed, "seed"."""

    dtype: ValueType
    draw: Draw | None = None

    def support(self, parts: Buffers) -> Tree:
        """See `Codec`. Bitmaps are not turned into positions first."""
        if self.draw is not None:
            return super().support(parts)
        sent = {name: (parts[f"{name}.positions"], parts[f"{name}.values"].size) for name, _ in self.shapes}
        return {
            name: torch.from_numpy(decode_mask(sent[name][0], math.prod(shape), sent[name][1])).view(shape)
            for name, shape in self.shapes
        }

    def pieces(self, parts: Buffers) -> Iterator[Packet]:
        """See `Divisible`."""
        sizes = sizes_of(self.shapes)
        drawn_positions = self._drawn(parts, sizes)
        buffers = {name: encode_positions(positions, sizes[name]) for name, positions in drawn_positions.items()}
        del drawn_positions
        for name, size in sizes.items():
            values = parts[f"{name}.values"]
            read = 0
            buffer = buffers[name] if buffers else parts[f"{name}.positions"]
            for index, (positions, count) in enumerate(cut_positions(buffer, size, values.size, PIECE)):
                shape = (min(PIECE, size - index * PIECE),)
                piece = {f"{name}.values": values[read : read + count], f"{name}.positions": positions}
                yield Packet(piece, SparseCodec(((name, shape),), self.dtype))
                read += count

    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        sizes = sizes_of(self.shapes)
        drawn_positions = self._drawn(parts, sizes)
        for name, size in sizes.items():
            values = decode_values(parts[f"{name}.values"], self.dtype)
            positions = drawn_positions.get(name)
            if positions is None:
                positions = decode_positions(parts[f"{name}.positions"], size, values.numel())
            yield name, torch.from_numpy(positions), values

    def num_values(self, parts: Buffers) -> int:
        return sum(parts[f"{name}.values"].size for name, _ in self.shapes)

    def _drawn(self, parts: Buffers, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The positions drawn from the shared seed; empty if the packet has its own positions."""
        return self.draw(seed_of(parts, SEED), sizes) if self.draw else {}


def seed_of(parts: Buffers, name: str) -> int:
    """The shared seed in the buffer `name`."""
    return int(parts[name][0])


def sparse_packet(values: Tree, support: Tree) -> Packet:
    """The packet of `values` where the boolean tree `support` is True; zeros inside the support are sent too.

    ValueError on NaN or infinity anywhere in `values`, and if `support` does not fit.
    """
    flats = {name: entries(name, tensor) for name, tensor in values.items()}
    positions: dict[str, np.ndarray] = {}
    for name, tensor in values.items():
        mask = support.get(name)
        if mask is None or mask.dtype != torch.bool or mask.shape != tensor.shape:
            actual = "missing" if mask is None else f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise RayflError(f"support of {name!r} is {actual}; it must be bool of shape {tuple(tensor.shape)}")
        positions[name] = np.flatnonzero(mask.cpu().numpy())
    selection = SelectedEntries(positions)
    return _packet(selection.values(flats), selection, shapes_of(values), "fp32")


def top_k_support(x: Tree, keep_ratio: float, scope: Scope = "tensor") -> Tree:
    """Boolean tree with exactly k True: the largest magnitudes, ties to the lowest flat index.

    k = max(1, ceil(keep_ratio * n - 1e-9)) of the n entries of each tensor (scope "tensor") or of the whole tree in
    its order (scope "model"). If fewer than k entries are nonzero, the zeros of lowest index are among the k.
    """
    flats = {name: entries(name, tensor) for name, tensor in x.items()}
    support = masks_of(shapes_of(x), False)
    for name, positions in _top_k(flats, keep_ratio, scope).items():
        support[name].view(-1)[torch.from_numpy(positions)] = True
    return support


def kept_entries(num_entries: int, keep_ratio: float) -> int:
    """k of n: max(1, ceil(keep_ratio * n - 1e-9)), 0 for n = 0. The 1e-9: 1 - 0.7 is 0.30000000000000004 in floats."""
    return min(num_entries, max(1, math.ceil(keep_ratio * num_entries - 1e-9)))


def split_positions(positions: np.ndarray, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Split increasing positions in the concatenated tensors into positions in each tensor."""
    starts = [0, *itertools.accumulate(sizes.values())]
    pieces = np.split(positions, np.searchsorted(positions, starts[1:-1]))
    return {name: piece - start for name, piece, start in zip(sizes, pieces, starts, strict=False)}


def kept_share(num_entries: int, keep_ratio: float, scope: Scope) -> float:
    """The smallest k / n: of all entries, or with scope "tensor" of any tensor that may be among `num_entries` of them.

    k >= keep_ratio * n - 1e-9 and k >= 1, so k / n >= keep_ratio / (1 + 1e-9). If keep_ratio differs from a fraction
    with a denominator of at most 1000 by less than 5e-10 / n, then k / n is at least that fraction, since k is whole.
    """
    if scope == "model":
        return kept_entries(num_entries, keep_ratio) / num_entries
    simple = Fraction(keep_ratio).limit_denominator(1000)
    exact = abs(simple - Fraction(keep_ratio)) * num_entries < 5e-10
    return max(1 / num_entries, float(simple) if exact else keep_ratio / (1 + 1e-9))


class Sparsifier(Compressor):
    """Sends some entries and drops the others. `compose` can encode the sent values with a quantizer."""

    values: ValueType = Field(default="fp32", description="type of the values that are sent")

    @abstractmethod
    def choose(self, flats: Tree, generator: np.random.Generator) -> SelectedEntries:
        """Choose the entries to send; `flats` are finite float32 tensors [numel] in main memory."""

    def select(self, x: Tree, generator: np.random.Generator) -> tuple[Tree, SelectedEntries]:
        """The values to send, float32 [count] of each tensor in main memory, and their positions.

        ValueError on NaN and infinity.
        """
        flats = {name: entries(name, tensor) for name, tensor in x.items()}
        selection = self.choose(flats, generator)
        return selection.values(flats), selection

    @abstractmethod
    def most_kept(self, num_entries: int) -> int:
        """The largest number of entries kept of one tensor in a tree of `num_entries` entries."""

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The kept values, and positions or a seed. ValueError on NaN, infinity, or values too large for their type."""
        values, selection = self.select(x, generator)
        return _packet(values, selection, shapes_of(x), self.values), memory


class KeptShare(Compressor):
    """A compressor that sends a share of the entries."""

    keep_ratio: KeepRatio = 0.1

    def keeping(self, ratio: float) -> Self:
        return self.model_copy(update={"keep_ratio": ratio})

    def most_kept(self, num_entries: int) -> int:
        """The largest number of entries kept of one tensor in a tree of `num_entries` entries."""
        return kept_entries(num_entries, self.keep_ratio)


class TopK(KeptShare, Sparsifier, on_device=True):
    """The k entries of largest magnitude, exactly, ties to the lowest index; float64 input is sent as float32.

    `keep_ratio`: k / n, in (0, 1]; `scope`: k of each tensor or of the whole tree; `values`: their type in the message.
    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    name = "topk"
    scope: Scope = "tensor"

    def choose(self, flats: Tree, generator: np.random.Generator) -> SelectedEntries:
        """The positions of the largest entries; draws nothing."""
        return SelectedEntries(_top_k(flats, self.keep_ratio, self.scope))

    def select(self, x: Tree, generator: np.random.Generator) -> tuple[Tree, SelectedEntries]:
        """See `Sparsifier`. Of tensors on a GPU only the values and their positions are copied to main memory."""
        if not any(map(is_on_device, x.values())):
            return super().select(x, generator)
        flat = torch.cat([unchecked(name, tensor) for name, tensor in x.items()])
        sizes = sizes_of(shapes_of(x))
        if not math.isfinite(flat.sum()):
            # One of finite numbers may overflow.
            for name, tensor in x.items():
                entries_on_device(name, tensor)
        cuts = [*sizes.values()] if self.scope == "tensor" else [len(flat)]
        largest = top_k_of_each(flat, cuts, [kept_entries(size, self.keep_ratio) for size in cuts])
        narrow = torch.int32 if len(flat) < 1 << 31 else torch.int64
        narrow_positions, values = download([largest.to(narrow), flat.index_select(0, largest)])
        positions = split_positions(narrow_positions.numpy().astype(np.int64), sizes)
        kept = values.split([len(of_tensor) for of_tensor in positions.values()])
        return dict(zip(sizes, kept, strict=True)), SelectedEntries(positions)

    def delta(self, num_entries: int) -> float | None:
        """(1 - u^2) k / n with unit roundoff u of `values`; with scope "tensor" k / n is the smallest of any tensor."""
        if self.values not in UNIT_ROUNDOFF or num_entries == 0:
            return None
        return kept_share(num_entries, self.keep_ratio, self.scope) * (1 - UNIT_ROUNDOFF[self.values] ** 2)


def _packet(values: Tree, selection: SelectedEntries, shapes: Shapes, dtype: ValueType) -> Packet:
    parts = {} if selection.seed is None else {SEED: selection.seed}
    sizes = sizes_of(shapes)
    for name, kept in values.items():
        parts[f"{name}.values"] = encode_values(name, kept, dtype)
        if selection.draw is None:
            parts[f"{name}.positions"] = encode_positions(selection.positions[name], sizes[name])
    return Packet(parts, SparseCodec(shapes, dtype, selection.draw))


def _top_k(flats: Tree, keep_ratio: float, scope: Scope) -> dict[str, np.ndarray]:
    """Positions of the kept entries of each flat tensor."""
    arrays = {name: flat.numpy() for name, flat in flats.items()}
    if scope == "tensor":
        return {name: top_k_positions(array, kept_entries(array.size, keep_ratio)) for name, array in arrays.items()}
    if not arrays:
        return {}
    joined = np.concatenate(list(arrays.values()))
    positions = top_k_positions(joined, kept_entries(joined.size, keep_ratio))
    return split_positions(positions, {name: array.size for name, array in arrays.items()})
