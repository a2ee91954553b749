"""Packet, the only thing that crosses a wire, and Compressor, what makes one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from rayfl.settings import Settings

Tree = dict[str, Tensor]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a tree's tensors in order; both ends know them, so they are not billed."""


class Codec(Protocol):
    """What both ends of the wire agree on beforehand (shapes, settings); it turns a packet's buffers into tensors."""

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        """The tensors that the receiver sees, as new tensors that own their memory (or read-only views for dense fp32)."""
        ...

    def support(self, parts: Mapping[str, np.ndarray]) -> Tree:
        """Boolean tensors: which entries were sent (all of them for a dense packet)."""
        ...

    def add_to(self, parts: Mapping[str, np.ndarray], total: Tree, weight: float) -> None:
        """total += weight * decoded, in place, without building the decoded tree where that can be avoided."""
        ...


@dataclass(frozen=True)
class Packet:
    """Encoded buffers and the codec that reads them.

    `parts` are the real buffers (int32 positions, packed bits, fp16 values, ...), each a one-dimensional array.
    """

    parts: Mapping[str, np.ndarray]
    codec: Codec

    @property
    def num_bits(self) -> int:
        """Exact size of the buffers on the wire, positions, scales and flags included."""
        return 8 * sum(part.nbytes for part in self.parts.values())

    def decode(self) -> Tree:
        """What the receiver sees: dict of float32 tensors in the shapes of the tree that was encoded."""
        return self.codec.decode(self.parts)

    def support(self) -> Tree:
        """Boolean tensors, True where an entry was sent."""
        return self.codec.support(self.parts)

    def add_to(self, total: Tree, weight: float) -> None:
        """total += weight * self.decode(), in place."""
        self.codec.add_to(self.parts, total, weight)


Message = Mapping[str, Packet]


def message_bits(message: Message) -> int:
    """Bits of all packets of a message."""
    return sum(packet.num_bits for packet in message.values())


class Compressor(Settings, ABC):
    """Turns a tree into a packet. Frozen: whatever it remembers between calls is the explicit `memory` tree."""

    name: ClassVar[str]

    def init(self, like: Tree) -> Tree:
        """The memory before the first call; empty for compressors that remember nothing."""
        return {}

    @abstractmethod
    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Encode the tree `x`; returns the packet and the memory for the next call. ValueError on NaN or infinity."""
