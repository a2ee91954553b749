"""Combines two compressors: a sparsifier chooses entries, and a quantizer encodes the chosen ones."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator

from rayfl.choices.kinds import TO_TABLE, from_table
from rayfl.compress.base import Buffers, Compressor, Packet, Quantizer, RayflError, Tree, shapes_of
from rayfl.compress.codecs import PositionedCodec
from rayfl.compress.positions import decode_counted, encode_counted
from rayfl.compress.quantize import QSGD
from rayfl.compress.sparse import SEED, Draw, Sparsifier, TopK, seed_of, sizes_of

OUTER, INNER = "outer:", "inner:"
"""Prefixes of the names of the two compressors' buffers."""


@dataclass(frozen=True)
class ComposeCodec(PositionedCodec):
    """Reads "outer:seed" or "outer:<name>.positions" (see `encode_counted`), and "inner:" the quantizer's buffers.

    The number of kept entries follows from the positions; beyond them the receiver knows only `shapes`.
    """

    draw: Draw | None
    # Any: the codec of a Quantizer, a dataclass with the field `shapes`, which is () here.
    inner: Any

    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        positions = self._positions(parts)
        codec = replace(self.inner, shapes=tuple((name, (kept.size,)) for name, kept in positions.items()))
        inner = {name.removeprefix(INNER): part for name, part in parts.items() if name.startswith(INNER)}
        for name, values in codec.decode(inner).items():
            yield name, torch.from_numpy(positions[name]), values

    def num_values(self, parts: Buffers) -> int:
        return sum(kept.size for kept in self._positions(parts).values())

    def _positions(self, parts: Buffers) -> dict[str, np.ndarray]:
        sizes = sizes_of(self.shapes)
        if self.draw is not None:
            return self.draw(seed_of(parts, OUTER + SEED), sizes)
        return {name: decode_counted(parts[f"{OUTER}{name}.positions"], size) for name, size in sizes.items()}


class Compose(Compressor, on_device=True):
    """Q(S(v)): the sparsifier `outer`, S, chooses entries (and scales them, if it does), and the quantizer `inner`, Q,
    encodes those of each tensor as a vector.

    Bits: those of Q for the vectors of kept entries, and the seed, or the positions in their cheapest code (one byte if
    all entries of a tensor are kept). The setting `values` of S has no meaning here.
    Source: Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification and
    Local Computations", NeurIPS 2019, section 2 (there with top-k and rand-k).
    """

    name = "compose"
    outer: Annotated[Sparsifier, from_table(Sparsifier), TO_TABLE] = Field(
        default=TopK(), description="chooses the entries: topk, randk or threshold"
    )
    inner: Annotated[Quantizer, from_table(Quantizer), TO_TABLE] = Field(
        default=QSGD(), description="encodes the chosen entries: any quantizer"
    )

    @model_validator(mode="after")
    def _fits(self) -> "Compose":
        if self.outer.values != "fp32":
            raise RayflError(
                f"={self.outer.values!r} has no meaning in compose: inner encodes the values", key=("outer", "values")
            )
        return self

    def keeping(self, ratio: float) -> "Compose | None":
        outer = self.outer.keeping(ratio)
        return None if outer is None else self.model_copy(update={"outer": outer})

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The inner packet of the kept entries, and their positions. ValueError on NaN and infinity, or from inner."""
        values, selection = self.outer.select(x, generator)
        inner, _ = self.inner.encode(values, {}, generator)
        if selection.seed is not None:
            parts = {OUTER + SEED: selection.seed}
        else:
            parts = {
                f"{OUTER}{name}.positions": encode_counted(positions, x[name].numel())
                for name, positions in selection.positions.items()
            }
        parts |= {INNER + name: part for name, part in inner.parts.items()}
        # Any: see ComposeCodec.
        codec: Any = inner.codec
        return Packet(parts, ComposeCodec(shapes_of(x), selection.draw, replace(codec, shapes=()))), memory

    def omega(self, num_entries: int) -> float | None:
        """(1 + w1)(1 + w2) - 1 where both are unbiased: E||Q(S v)||^2 <= (1 + w2) E||S v||^2 <= (1 + w2)(1 + w1)
        ||v||^2."""
        first, second = self.outer.omega(num_entries), self.inner.omega(self.outer.most_kept(num_entries))
        return None if first is None or second is None else (1 + first) * (1 + second) - 1

    def delta(self, num_entries: int) -> float | None:
        """delta1 * delta2, where S keeps entries as they are: ||v||^2 - ||S v||^2 is dropped, at most (1 - delta2)
        ||S v||^2 lost by Q, and ||S v||^2 >= delta1 ||v||^2."""
        first, second = self.outer.delta(num_entries), self.inner.delta(self.outer.most_kept(num_entries))
        return None if first is None or second is None else first * second

    def expected_delta(self, num_entries: int) -> float | None:
        """delta1 * delta2 in expectation, by the same argument."""
        if self.outer.omega(num_entries) is not None:
            return super().expected_delta(num_entries)
        first = self.outer.expected_delta(num_entries)
        second = self.inner.expected_delta(self.outer.most_kept(num_entries))
        return None if first is None or second is None else first * second
