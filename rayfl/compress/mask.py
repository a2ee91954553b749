"""Boolean masks at one bit an entry."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.compress.base import Packet, WholeTensorCodec, cuts, shapes_of
from rayfl.compress.values import BYTES, buffer_of
from rayfl.errors import RayflError
from rayfl.tree import Tree, pack_bits, unpack_bits


class MaskCodec(WholeTensorCodec):
    """Reads one bit buffer a tensor, under the tensor's name; decodes to boolean tensors, which add up as 0 and 1."""

    def read(self, parts: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> Tensor:
        return unpack_bits(_bits(parts, name, shape), shape)

    def pieces(self, parts: Mapping[str, np.ndarray]) -> Iterator[Packet]:
        """See `Divisible`."""
        shapes = dict(self.shapes)
        for name, first, last in cuts(self.shapes):
            bits = _bits(parts, name, shapes[name])
            yield Packet({name: bits[first // 8 : -(-last // 8)]}, MaskCodec(((name, (last - first,)),)))


def _bits(parts: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    return buffer_of(parts, name, BYTES, -(-math.prod(shape) // 8))


def mask_packet(mask: Tree) -> Packet:
    """The packet of boolean tensors: ceil(n / 8) bytes a tensor of n entries. ValueError on other types."""
    for name, tensor in mask.items():
        if tensor.dtype != torch.bool:
            raise RayflError(f"mask {name!r} is {tensor.dtype}; make it boolean, for example with `weights != 0`")
    return Packet({name: pack_bits(tensor) for name, tensor in mask.items()}, MaskCodec(shapes_of(mask)))
