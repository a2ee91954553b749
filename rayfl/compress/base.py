"""Packet: the only thing that is sent between clients and servers. Compressor: turns a tree into a packet."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field

from rayfl.choices.kinds import Choice
from rayfl.compress.values import UNIT_ROUNDOFF, decode_values, encode_values, entries, entries_on_device
from rayfl.data.transfer import to_device
from rayfl.errors import RayflError
from rayfl.tree import ALIGNMENT_BYTES, Difference, Tree, pack_bits, tensor_over, unpack_bits, unwritten

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a tree's tensors in order; both ends know them, so they are not billed."""

Buffers = Mapping[str, np.ndarray]
"""A packet's encoded buffers by name."""

LARGE = 1 << 20
"""From this number of entries on (4 MB) numpy's memory has huge pages."""

PIECE = 1 << 16
"""Entries of a piece, which fits into the processor's cache; a multiple of 8, so that bits fill whole bytes."""

BLOCK = 1 << 18
"""Entries that are multiplied and added at a time: few enough for a cache, and enough that calls cost little."""


class Codec(Protocol):
    """Turns a packet's buffers into tensors, with what both ends know beforehand (shapes, settings)."""

    @abstractmethod
    def decode(self, parts: Buffers) -> Tree:
        """The tensors that the receiver sees: new tensors that own their memory, or for dense fp32 read-only views."""

    @abstractmethod
    def support(self, parts: Buffers) -> Tree:
        """Boolean tensors: which entries were sent (all of them for a dense packet)."""

    @abstractmethod
    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        """total += weight * decoded, in place, if possible without building the decoded tree."""

    @abstractmethod
    def num_values(self, parts: Buffers) -> int:
        """Entries whose value the packet carries, at any width; positions, scales and seeds are not counted."""


@runtime_checkable
class Divisible(Protocol):
    """A codec whose packets can be read a piece at a time, without decoding the rest."""

    shapes: Shapes

    @abstractmethod
    def pieces(self, parts: Buffers) -> "Iterator[Packet]":
        """The packets of the pieces of `cuts(self.shapes)`; each decodes to {name: [last - first]}."""


@dataclass(frozen=True)
class Packet:
    """Encoded buffers and the codec that reads them.

    `parts` are the real buffers (int32 positions, packed bits, fp16 values, ...), each a one-dimensional array.
    """

    parts: Buffers
    codec: Codec

    @property
    def num_bits(self) -> int:
        """Exact size of the buffers that are sent, positions, scales and flags included."""
        return 8 * sum(part.nbytes for part in self.parts.values())

    @cached_property
    def num_values(self) -> int:
        """Entries whose value it carries, see `Codec`."""
        return self.codec.num_values(self.parts)

    def decode(self) -> Tree:
        """The tree that the receiver sees, in the encoded shapes: float32; bool for masks, float64 for counts.

        The tensors must not be changed: those of a dense fp32 packet are views of its buffers.
        """
        return self.codec.decode(self.parts)

    def decode_beside(self, like: Tree) -> Tree:
        """`decode`, on the device of `like`: for clients that read their own messages."""
        return to_device(self.decode(), device_of(like))

    def support(self) -> Tree:
        """Boolean tensors, True where an entry was sent."""
        return self.codec.support(self.parts)

    def presence(self) -> Tree:
        """`support` in float32: 1 where an entry was sent, else 0. The tensors must not be changed."""
        # Through numpy: torch takes ten times as long to turn booleans into numbers.
        masks = {name: mask.numpy() for name, mask in self.support().items()}
        return {name: torch.from_numpy(mask.view(np.uint8).astype(np.float32)) for name, mask in masks.items()}

    def add_to(self, total: Tree, weight: float) -> None:
        """total += weight * self.decode(), in place."""
        self.codec.add_to(self.parts, total, weight)

    def times(self, weight: float) -> Tree:
        """weight * self.decode() in new tensors, and 0.0 where that is -0.0, as if it had been added to zeros."""
        return {name: torch.mul(tensor, weight).add_(0.0) for name, tensor in self.decode().items()}

    def written(self) -> "Packet":
        """The same packet with its buffers made (`UnwrittenDense` has none until somebody reads them)."""
        return self

    def pieces(self) -> "Iterator[Packet]":
        """The packet in pieces, see `Divisible`. Raises TypeError if the codec is not divisible."""
        if not isinstance(self.codec, Divisible):
            raise TypeError(f"{type(self.codec).__name__} decodes only as a whole; give it a method `pieces`")
        return self.codec.pieces(self.parts)

    def opened(self) -> "Packet":
        """The same packet, which is decoded at most once, even if several clients read it."""
        return Opened(self.parts, self.codec)


class Opened(Packet):
    """A packet that keeps its decoded tree, for several clients that read one message; never sent."""

    def decode(self) -> Tree:
        return self._decoded

    def presence(self) -> Tree:
        return self._presence

    def add_to(self, total: Tree, weight: float) -> None:
        # Adding the decoded tree takes a twentieth of the time of finding positions, even if few entries were sent.
        add_decoded(self._decoded, total, weight)

    @cached_property
    def _decoded(self) -> Tree:
        return unwritten(self.codec.decode(self.parts))

    @cached_property
    def _presence(self) -> Tree:
        return super().presence()

    def opened(self) -> Packet:
        return self


Message = Mapping[str, Packet]


def device_of(x: Tree) -> torch.device:
    """The device of a tree's tensors; the CPU for a tree without tensors."""
    return next((tensor.device for tensor in x.values()), torch.device("cpu"))


def decoded_bytes(packet: Packet) -> int:
    """Bytes of a packet's decoded float32 tensors; 0 for a codec that does not name its shapes."""
    shapes: Shapes = getattr(packet.codec, "shapes", ())
    return 4 * sum(math.prod(shape) for _, shape in shapes)


def shapes_of(x: Tree) -> Shapes:
    """Names and shapes of a tree's tensors, which its codec needs."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in x.items())


def cuts(shapes: Shapes) -> Iterator[tuple[str, int, int]]:
    """Yield name, first entry and end of every piece: each tensor row by row, PIECE entries at a time."""
    for name, shape in shapes:
        size = math.prod(shape)
        for first in range(0, size, PIECE):
            yield name, first, min(first + PIECE, size)


def zeros_of(shapes: Shapes) -> Tree:
    """A float32 tree of zeros."""
    return {name: _zeros(shape) for name, shape in shapes}


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros. Large tensors use numpy's memory, whose huge pages make the first write of 44 MB take 4 ms instead of 30.

    They are aligned like torch's own memory.
    """
    size = math.prod(shape)
    if size < LARGE:
        return torch.zeros(shape)
    buffer = np.zeros(size + ALIGNMENT_BYTES // 4, np.float32)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES // 4
    return torch.from_numpy(buffer[start : start + size]).view(shape)


def masks_of(shapes: Shapes, sent: bool) -> Tree:
    """A boolean tree that is `sent` everywhere: the support of a packet that sends every entry, or none."""
    return {name: torch.full(shape, sent) for name, shape in shapes}


def add_decoded(decoded: Tree, total: Tree, weight: float) -> None:
    """total += weight * decoded, in place."""
    for name, tensor in decoded.items():
        _add_scaled(total[name], tensor.to(total[name].device), weight)


def _add_scaled(total: torch.Tensor, x: torch.Tensor, weight: float) -> None:
    """Add weight * x in place, rounding the products first as a sum's first message has them.

    `add_(x, alpha=weight)` may round once where a product and then a sum round twice. A block of products at a time
    stays in the processor's cache.
    """
    if x.numel() <= BLOCK or total.device.type != "cpu" or not (x.is_contiguous() and total.is_contiguous()):
        total.add_(x * weight)
        return
    products = torch.empty(BLOCK, dtype=total.dtype, device=total.device)
    for block, values in zip(total.view(-1).split(BLOCK), x.view(-1).split(BLOCK), strict=True):
        block.add_(torch.mul(values, weight, out=products[: len(values)]))


def message_bits(message: Message) -> int:
    """Bits of all packets of a message."""
    return sum(packet.num_bits for packet in message.values())


class Compressor(Choice, ABC):
    """Turns a tree into a packet. Frozen: whatever it remembers between calls is the explicit `memory` tree."""

    label = "compressor"
    package = "rayfl.compress"
    on_device: ClassVar[bool] = False
    """Whether `encode` takes tensors of a GPU. False unless the class itself says so; not inherited."""

    # Any: what pydantic takes.
    def __init_subclass__(cls, on_device: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.on_device = vars(cls).get("on_device", on_device)

    @property
    def takes_device(self) -> bool:
        """Whether it and all compressors inside it take tensors of a GPU."""
        inner = (getattr(self, name) for name in type(self).model_fields)
        return self.on_device and all(
            compressor.takes_device for compressor in inner if isinstance(compressor, Compressor)
        )

    def init(self, like: Tree) -> Tree:
        """The memory before the first call, in which an error has its tensor's name; empty if nothing is remembered."""
        return {}

    @abstractmethod
    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Encode the tree `x`; returns the packet and the memory for the next call. ValueError on NaN or infinity."""

    def encode_difference(self, x: Difference, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Encode `x.tree()`. A compressor that sends all entries unchanged may subtract later, when the packet is read.

        ValueError on NaN or infinity: here, or when the packet's buffers are made or added.
        """
        return self.encode(x.tree(), memory, generator)

    def keeping(self, ratio: float) -> "Compressor | None":
        """The same compressor for a client that keeps a share `ratio` of the entries; None if it has no such share."""
        return None

    def omega(self, num_entries: int) -> float | None:
        """The constant of an unbiased compressor C: E C(v) = v and E||C(v) - v||^2 <= omega ||v||^2; None if biased.

        It holds for every tree of `num_entries` entries, however they are divided into tensors, apart from rounding
        decoded numbers to float32, which changes each by at most 2^-24 of itself.
        """
        return None

    def delta(self, num_entries: int) -> float | None:
        """The constant of a contraction C: ||C(v) - v||^2 <= (1 - delta) ||v||^2 for every v; None if none holds.

        It holds for every draw, and for every tree of `num_entries` entries, however they are divided into tensors.
        """
        return None

    def expected_delta(self, num_entries: int) -> float | None:
        """The constant of a contraction in expectation: E||C(v) - v||^2 <= (1 - delta) ||v||^2; None if none holds.

        By default it follows from the other two: `delta`, or 1 - omega if omega is below 1. Rounding as in `omega`.
        """
        delta, omega = self.delta(num_entries), self.omega(num_entries)
        from_omega = 1 - omega if omega is not None and omega < 1 else None
        return max((constant for constant in (delta, from_omega) if constant is not None), default=None)


def encode_trees(
    compressor: Compressor,
    trees: Mapping[str, Tree | Difference],
    memories: Mapping[str, Tree],
    generator: np.random.Generator,
) -> tuple[dict[str, Packet], dict[str, Tree]]:
    """Encode every tree with one compressor; returns the packets and the new memories, both under the trees' names."""
    packets: dict[str, Packet] = {}
    memories = dict(memories)
    for name, value in trees.items():
        if isinstance(value, Difference):
            memory = memories.get(name) or compressor.init(value.a)
            encoded = compressor.encode_difference(value, memory, generator)
        else:
            encoded = compressor.encode(value, memories.get(name) or compressor.init(value), generator)
        packets[name], memory = _checked(compressor, encoded)
        if memory:
            memories[name] = memory
    return packets, memories


# object: a third party's class may return anything.
def _checked(compressor: Compressor, encoded: object) -> tuple[Packet, Tree]:
    """The packet and the memory that a compressor returns. Raise TypeError, which names it, for anything else."""
    match encoded:
        case Packet() as packet, dict() as memory:
            # The parts of other packets may not be made yet.
            parts = packet.parts if type(packet) is Packet else {}
            if wrong := [name for name, part in parts.items() if not isinstance(part, np.ndarray)]:
                raise TypeError(
                    f"{type(compressor).__name__}.encode must put numpy arrays into its packet, and {wrong[0]!r} is of "
                    f"type {type(parts[wrong[0]]).__name__}"
                )
            return packet, memory
    raise TypeError(f"{type(compressor).__name__}.encode must return a packet and its next memory, tensors by name")


class Quantizer(Compressor):
    """Sends a few bits for every entry and encodes each tensor by itself; `compose` takes one as its inner compressor.

    A tree's constants are those of its largest tensor: omega does not fall and delta does not rise with num_entries.
    Its codec is a dataclass with the field `shapes`, and nothing else in it depends on the tree.
    """
