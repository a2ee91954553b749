"""Boolean masks at one bit per entry or near their entropy, and values at the entries of a mask that both ends know."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rayfl.compress.base import (
    Buffers,
    Packet,
    Tree,
    cuts,
    decode_values,
    encode_values,
    entries,
    pack_bits,
    shapes_of,
    unpack_bits,
)
from rayfl.compress.codecs import PositionedCodec, WholeTensorCodec
from rayfl.compress.golomb import decode_golomb, encode_golomb, low_bits


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


BITMAP, RARE_ONES, RARE_ZEROS = 0, 1, 2
COUNT_BYTES = 4


class CodedMaskCodec(WholeTensorCodec):
    """Reads one buffer a tensor, see `coded_mask_packet`; decodes as `MaskCodec` does."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        label, body = int(parts[name][0]), parts[name][1:]
        if label == BITMAP:
            return unpack_bits(body, shape)
        size, count = int(np.prod(shape)), int(body[:COUNT_BYTES].copy().view(np.uint32)[0])
        rare = np.zeros(size, np.bool_)
        rare[decode_golomb(body[COUNT_BYTES:], size, count, low_bits(max(1, count) / size))] = True
        return torch.from_numpy(rare if label == RARE_ONES else ~rare).view(shape)


def coded_mask_packet(mask: Tree) -> Packet:
    """The packet of boolean tensors, each as a byte and the shorter of two codes.

    One is a bit for every entry. The other one is the number of True or of False, whichever is smaller, in 4 bytes, and
    the Golomb-Rice code of their positions, which takes at most 4% more than the binary entropy of their share.
    """
    return Packet({name: _coded(tensor) for name, tensor in mask.items()}, CodedMaskCodec(shapes_of(mask)))


def _coded(mask: torch.Tensor) -> np.ndarray:
    bitmap, flat = pack_bits(mask), mask.detach().cpu().numpy().ravel()
    is_rare = 2 * int(flat.sum()) <= flat.size
    positions = np.flatnonzero(flat if is_rare else ~flat)
    count = np.array([positions.size], np.uint32).view(np.uint8)
    golomb = encode_golomb(positions, flat.size, low_bits(max(1, positions.size) / max(1, flat.size)))
    if COUNT_BYTES + golomb.size >= bitmap.size:
        return np.concatenate([np.array([BITMAP], np.uint8), bitmap])
    return np.concatenate([np.array([RARE_ONES if is_rare else RARE_ZEROS], np.uint8), count, golomb])


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
