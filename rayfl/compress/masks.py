"""Boolean masks at one bit per entry, and values at the entries of a mask that both ends know already."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rayfl.compress.base import (
    Buffers,
    Packet,
    PositionedCodec,
    Tree,
    WholeTensorCodec,
    cuts,
    decode_values,
    encode_values,
    entries,
    pack_bits,
    shapes_of,
    unpack_bits,
)


class MaskCodec(WholeTensorCodec):
    """Reads one bit buffer a tensor, under the tensor's name; decodes to boolean tensors, which add up as 0 and 1."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return unpack_bits(parts[name], shape)

    def pieces(self, parts: Buffers) -> Iterator[Packet]:
        """See `Divisible`."""
        for name, first, last in cuts(self.shapes):
            yield Packet({name: parts[name][first // 8 : -(-last // 8)]}, MaskCodec(((name, (last - first,)),)))


def mask_packet(mask: Tree) -> Packet:
    """The packet of boolean tensors: ceil(n / 8) bytes a tensor of n entries. TypeError for floats."""
    return Packet({name: pack_bits(tensor) for name, tensor in mask.items()}, MaskCodec(shapes_of(mask)))


@dataclass(frozen=True, eq=False)
class KnownSupportCodec(PositionedCodec):
    """Reads "<name>.values" of each tensor; `bits`: the support, packed by `pack_bits`; both ends remember it."""

    bits: Buffers

    def support(self, parts: Buffers) -> Tree:
        return {name: unpack_bits(self.bits[name], shape) for name, shape in self.shapes}

    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, mask in self.support(parts).items():
            yield name, torch.nonzero(mask.view(-1)).view(-1), decode_values(parts[f"{name}.values"], "fp32")

    def num_values(self, parts: Buffers) -> int:
        return sum(parts[f"{name}.values"].size for name, _ in self.shapes)


def known_support_packet(values: Tree, support: Tree) -> Packet:
    """The packet of `values` where the boolean tree `support` is True, 4 bytes each.

    For a receiver that knows `support` already. ValueError on NaN or infinity in `values`.
    """
    chosen = {name: entries(name, tensor)[support[name].cpu().reshape(-1)] for name, tensor in values.items()}
    parts = {f"{name}.values": encode_values(name, flat, "fp32") for name, flat in chosen.items()}
    bits = {name: pack_bits(support[name]) for name in values}
    return Packet(parts, KnownSupportCodec(shapes_of(values), bits))
