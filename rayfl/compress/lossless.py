"""Lossless: compresses every buffer of another compressor's packet with zlib."""

import zlib
from dataclasses import dataclass

import numpy as np

from rayfl.compress.base import Buffers, Codec, Packet, RayflError, Shapes, Tree, shapes_of
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.feedback import Around
from rayfl.tree import num_entries


@dataclass(frozen=True)
class LosslessCodec:
    """Reads the buffers of `inner`, each as a byte and its content, see `squeezed`.

    `most`: the largest number of bytes that a buffer may expand to.
    """

    shapes: Shapes
    inner: Codec
    most: int

    def raw(self, parts: Buffers) -> dict[str, np.ndarray]:
        """The buffers of `inner`. RayflError if one has more than `most` bytes."""
        return {name: expanded(name, part, self.most) for name, part in parts.items()}

    def decode(self, parts: Buffers) -> Tree:
        return self.inner.decode(self.raw(parts))

    def support(self, parts: Buffers) -> Tree:
        return self.inner.support(self.raw(parts))

    def num_values(self, parts: Buffers) -> int:
        return self.inner.num_values(self.raw(parts))

    add_to = WholeTensorCodec.add_to


class Lossless(Around, on_device=True):
    """The packet of `inner` without loss in fewer bytes: each of its buffers is compressed with zlib at level 6.

    The first bytes of all numbers come first, then all second bytes, and so on, since these resemble each other. A
    buffer that zlib does not make smaller is sent uncompressed. Bits: those of the new buffers, and 8 for each, which
    name the type of its numbers and whether it is compressed. So they exceed those of `inner` by at most 8 per buffer;
    they depend on the build of zlib, which platform.json names. Memory and constants are those of `inner`.
    zlib (RFC 1950) is that of Python's standard library.
    """

    name = "lossless"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The compressed buffers, and the memory of `inner`. Raises the errors of `inner`."""
        packet, memory = self.inner.encode(x, memory, generator)
        # A count sketch may be larger than the tree; all others have less than four times its bytes.
        most = max(64 + 16 * num_entries(x), *(part.nbytes for part in packet.parts.values()), 0)
        parts = {name: squeezed(part) for name, part in packet.parts.items()}
        return Packet(parts, LosslessCodec(shapes_of(x), packet.codec, most)), memory

    def omega(self, num_entries: int) -> float | None:
        return self.inner.omega(num_entries)

    def delta(self, num_entries: int) -> float | None:
        return self.inner.delta(num_entries)

    def expected_delta(self, num_entries: int) -> float | None:
        return self.inner.expected_delta(num_entries)


def squeezed(buffer: np.ndarray) -> np.ndarray:
    """uint8: a first byte, and the buffer's bytes ordered by their place in a number, compressed if that is smaller.

    The first byte is the letter of the buffer's dtype, plus 128 if the rest is compressed.
    """
    planes = np.ascontiguousarray(buffer).view(np.uint8).reshape(-1, buffer.itemsize).T.tobytes()
    content = min(planes, zlib.compress(planes, 6), key=len)
    return np.frombuffer(bytes([ord(buffer.dtype.char) + 128 * (content is not planes)]) + content, np.uint8)


def expanded(name: str, buffer: np.ndarray, most: int) -> np.ndarray:
    """The inverse. Raise RayflError for more than `most` bytes; at most `most` + 1 are made."""
    kind = np.dtype(chr(buffer[0] & 127))
    content = buffer[1:].tobytes()
    planes = zlib.decompressobj().decompress(content, most + 1) if buffer[0] & 128 else content
    if len(planes) > most:
        raise RayflError(f"the packet is damaged: {name!r} has more than {most} bytes, too many for its tensors")
    return np.frombuffer(planes, np.uint8).reshape(kind.itemsize, -1).T.copy().view(kind).ravel()
