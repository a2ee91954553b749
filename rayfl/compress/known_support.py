"""Sends values at positions that both ends know already, for example those of an unchanged mask."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.compress.base import Packet, PositionedCodec, shapes_of
from rayfl.compress.values import decode_values, encode_values, entries
from rayfl.tree import Tree, pack_bits, unpack_bits


@dataclass(frozen=True, eq=False)
class KnownSupportCodec(PositionedCodec):
    """Reads "<name>.values" of each tensor; `bits`: the support, packed by `pack_bits`; both ends remember it."""

    bits: Mapping[str, np.ndarray]

    def support(self, parts: Mapping[str, np.ndarray]) -> Tree:
        return {name: unpack_bits(self.bits[name], shape) for name, shape in self.shapes}

    def read(self, parts: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, mask in self.support(parts).items():
            yield name, torch.nonzero(mask.view(-1)).view(-1), decode_values(parts[f"{name}.values"], "fp32")

    def num_values(self, parts: Mapping[str, np.ndarray]) -> int:
        return sum(parts[f"{name}.values"].size for name, _ in self.shapes)


def known_support_packet(values: Tree, support: Tree) -> Packet:
    """The packet of `values` where the boolean tree `support` is True, 4 bytes each.

    For a receiver that knows `support` already. ValueError on NaN or infinity in `values`.
    """
    parts = {}
    for name, tensor in values.items():
        chosen = entries(name, tensor)[support[name].cpu().reshape(-1)]
        parts[f"{name}.values"] = encode_values(name, chosen, "fp32")
    bits = {name: pack_bits(support[name]) for name in values}
    return Packet(parts, KnownSupportCodec(shapes_of(values), bits))
