"""Boolean masks at one bit an entry."""

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from rayfl.compress.base import Packet, WholeTensorCodec, cuts, shapes_of
from rayfl.tree import Tree, pack_bits, unpack_bits


class MaskCodec(WholeTensorCodec):
    """Reads one bit buffer a tensor, under the tensor's name; decodes to boolean tensors, which add up as 0 and 1."""

    def read(self, parts: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> Tensor:
        return unpack_bits(parts[name], shape)

    def pieces(self, parts: Mapping[str, np.ndarray]) -> Iterator[Packet]:
        """See `Divisible`."""
        for name, first, last in cuts(self.shapes):
            yield Packet({name: parts[name][first // 8 : -(-last // 8)]}, MaskCodec(((name, (last - first,)),)))


def mask_packet(mask: Tree) -> Packet:
    """The packet of boolean tensors: ceil(n / 8) bytes a tensor of n entries. TypeError for floats."""
    return Packet({name: pack_bits(tensor) for name, tensor in mask.items()}, MaskCodec(shapes_of(mask)))
