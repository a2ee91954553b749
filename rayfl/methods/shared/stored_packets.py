"""A packet as a part of a state: its buffers as tensors. The codec is not kept, since a method knows it."""

import torch

from rayfl.compress.base import Codec
from rayfl.methods.base import Packet, Tree


def buffers(packet: Packet) -> Tree:
    """Copies of a packet's buffers, by name."""
    return {name: torch.from_numpy(part.copy()) for name, part in packet.parts.items()}


def packet_of(buffers: Tree, codec: Codec) -> Packet:
    """The packet that `buffers` was made of."""
    return Packet({name: buffer.numpy() for name, buffer in buffers.items()}, codec)
