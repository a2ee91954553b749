"""Dense: every entry is sent, at 32 or 16 bits."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.compress.base import Packet, Quantizer, Shapes, WholeTensorCodec, cuts, shapes_of
from rayfl.compress.values import (
    BUFFER_TYPES,
    UNIT_ROUNDOFF,
    ValueType,
    buffer_of,
    decode_values,
    encode_values,
    entries,
)
from rayfl.tree import Tree


@dataclass(frozen=True)
class DenseCodec(WholeTensorCodec):
    """Reads one buffer a tensor, under the tensor's name."""

    shapes: Shapes
    dtype: ValueType

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        kind = BUFFER_TYPES[self.dtype]
        return {
            name: decode_values(buffer_of(parts, name, kind, math.prod(shape)), self.dtype).view(shape)
            for name, shape in self.shapes
        }

    def pieces(self, parts: Mapping[str, np.ndarray]) -> Iterator[Packet]:
        """See `Divisible`."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes}
        for name, first, last in cuts(self.shapes):
            buffer = buffer_of(parts, name, BUFFER_TYPES[self.dtype], sizes[name])
            yield Packet({name: buffer[first:last]}, DenseCodec(((name, (last - first,)),), self.dtype))


class Dense(Quantizer):
    """All entries as fp32, or rounded to nearest even as fp16 or bf16. float64 input is sent as float32.

    fp32 copies nothing: the packet looks at the tensors, so nobody may write into them while it lives.
    The constants hold for numbers that are normal in float32 (|x| >= 2^-126) or zero.
    """

    name: ClassVar[str] = "dense"
    dtype: ValueType = Field(default="fp32", description="type of the numbers that are sent")

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """One buffer a tensor. ValueError on NaN, infinity and numbers too large for `dtype`."""
        parts = {name: encode_values(name, entries(name, tensor), self.dtype) for name, tensor in x.items()}
        return Packet(parts, DenseCodec(shapes_of(x), self.dtype)), memory

    def omega(self, num_entries: int) -> float | None:
        return 0.0 if self.dtype == "fp32" else None

    def delta(self, num_entries: int) -> float | None:
        return 1 - UNIT_ROUNDOFF[self.dtype] ** 2 if self.dtype in UNIT_ROUNDOFF else None
