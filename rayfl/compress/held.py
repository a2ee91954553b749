"""HeldCodec: reads packets of differences, which receivers add to a tree that they hold."""

from dataclasses import dataclass

import torch

from rayfl import tree
from rayfl.compress.base import Buffers, Codec, Packet, Shapes, shapes_of
from rayfl.compress.codecs import WholeTensorCodec


@dataclass(frozen=True, eq=False)
class HeldCodec:
    """Adds the tree that `inner` decodes, times `factor`, to `held`, the float32 arrays that all receivers have.

    `held` is not billed. A receiver that missed packets may be sent `num_whole` whole trees instead of all of them.
    """

    shapes: Shapes
    held: Buffers
    inner: Codec
    factor: float = 1.0
    num_whole: int = 1

    def decode(self, parts: Buffers) -> tree.Tree:
        """held + factor * difference: what the receivers hold from then on."""
        difference = self.inner.decode(parts)
        return {
            name: torch.add(torch.from_numpy(self.held[name]), difference[name], alpha=self.factor)
            for name, _ in self.shapes
        }

    def num_values(self, parts: Buffers) -> int:
        """Entries of the difference that were sent."""
        return self.inner.num_values(parts)

    # The receivers then have every entry.
    support = WholeTensorCodec.support
    add_to = WholeTensorCodec.add_to


def added_to(held: tree.Tree, packet: Packet, factor: float = 1.0, num_whole: int = 1) -> Packet:
    """The same buffers, which decode to held + factor * packet.decode(); see `HeldCodec`."""
    return Packet(packet.parts, HeldCodec(shapes_of(held), tree.to_arrays(held), packet.codec, factor, num_whole))
