"""Natural compression: random rounding to powers of two, which keeps the sign and the exponent of a float32."""

import math

import numpy as np
import torch

from rayfl.compress import packed_bits
from rayfl.compress.base import Buffers, Packet, Quantizer, Tree, entries, shapes_of
from rayfl.compress.codecs import WholeTensorCodec

MANTISSA_BITS = 23
MANTISSA = np.uint32((1 << MANTISSA_BITS) - 1)
MAGNITUDE = np.uint32(0x7FFFFFFF)
TOP_EXPONENT = 254
"""The exponent field of the largest float32 numbers; the field above it means infinity, here the largest number."""
LARGEST = np.uint32(0x7F7FFFFF)
"""The bits of the largest float32."""


class NaturalCodec(WholeTensorCodec):
    """Reads "<name>.exponents" (the biased exponent, a byte; 0 is zero) and "<name>.signs" (a bit, 1 is negative)."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        numbers = parts[f"{name}.exponents"].astype(np.uint32)
        numbers <<= np.uint32(MANTISSA_BITS)
        np.minimum(numbers, LARGEST, out=numbers)
        signs = np.unpackbits(parts[f"{name}.signs"], count=size).astype(np.uint32)
        signs <<= np.uint32(31)
        numbers |= signs
        return torch.from_numpy(numbers.view(np.float32))


class NaturalCompression(Quantizer, on_device=True):
    """2^a <= |v| < 2^(a + 1) becomes 2^(a + 1) with probability (|v| - 2^a) / 2^a, else 2^a, with the sign of v.

    Unbiased to the last bit, omega = 1/8 for numbers that are normal in float32 (|v| >= 2^-126) or zero; 9 bits per
    entry: a byte and a sign. If float32 has no neighbouring power of two, the same rule uses the nearest numbers
    that it has, still unbiased: subnormal numbers become 0 or 2^-126 (no relative bound holds), and numbers above 2^127
    become 2^127 or the largest float32.
    Source: Horvath, Ho, Horvath, Sahu, Canini, Richtarik, "Natural Compression for Distributed Deep Learning",
    MSML 2022, definition 1 and theorem 3.
    """

    name = "natural"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Random exponents and the signs of all entries. ValueError on NaN and infinity."""
        parts = {}
        for name, tensor in x.items():
            flat = entries(name, tensor).numpy()
            parts[f"{name}.exponents"] = _exponents(flat.view(np.uint32), generator)
            parts[f"{name}.signs"] = np.packbits(flat < 0)
        return Packet(parts, NaturalCodec(shapes_of(x))), memory

    def omega(self, num_entries: int) -> float | None:
        return 1 / 8


def _exponents(numbers: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Random biased exponents uint8 [n] of the float32 bits `numbers` [n].

    The mantissa is (|v| - 2^a) / 2^a in units of 2^-23, so a uniform number of 23 bits carries into the exponent with
    just that probability.
    """
    draws = packed_bits.random_bits(numbers.size, generator)
    draws &= MANTISSA
    magnitudes = numbers & MAGNITUDE
    draws += magnitudes
    draws >>= np.uint32(MANTISSA_BITS)
    exponents = draws.astype(np.uint8)
    if exponents.size and exponents.max() >= TOP_EXPONENT:
        top = np.flatnonzero(magnitudes >> np.uint32(MANTISSA_BITS) == TOP_EXPONENT)
        # The largest number lies one unit of the mantissa below 2^128: the probability is mantissa / (2^23 - 1).
        carried = generator.integers(0, MANTISSA, top.size, dtype=np.uint32) < (magnitudes[top] & MANTISSA)
        exponents[top] = TOP_EXPONENT + carried
    return exponents
