"""Signs without a scale: a bit an entry for +1 and -1, two bits where an entry may also be 0 (a tied vote)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.compress import bits
from rayfl.compress.base import Packet, WholeTensorCodec, shapes_of
from rayfl.compress.values import entries
from rayfl.tree import Tree

NUMBERS = np.array([1, -1, 0, 0], np.float32)
"""The number that each code stands for; without ties only the first two codes occur."""


@dataclass(frozen=True)
class VotesCodec(WholeTensorCodec):
    """Reads one buffer a tensor, under the tensor's name; decodes to +1, -1 and, in two bits, 0."""

    width: int

    def read(self, parts: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(NUMBERS[bits.unpack(parts[name], self.width, math.prod(shape))])


def votes_packet(x: Tree, ties: bool = False) -> Packet:
    """The signs of all entries, sign(0) = +1, in d bits; with `ties` sign(0) = 0 and 2d bits. Whole bytes a tensor.

    Decodes to float32. ValueError on NaN and infinity.
    """
    width = 2 if ties else 1
    parts = {}
    for name, tensor in x.items():
        flat = entries(name, tensor).numpy()
        codes = (flat < 0).astype(np.uint8)
        if ties:
            codes |= (flat == 0).astype(np.uint8) << 1
        parts[name] = bits.pack(codes, width)
    return Packet(parts, VotesCodec(shapes_of(x), width))
