"""EDEN: a random rotation makes the entries nearly normal, and each is then rounded to one of 2^bits numbers.

With one bit it is DRIVE: the signs of the rotated entries, and one scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rayfl.compress import packed_bits
from rayfl.compress.base import Buffers, Field, Packet, Quantizer, Tree, entries, shapes_of
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.sparse import SEED

NUMBERS = [
    np.array([*(-number for number in reversed(positive)), *positive], np.float32)
    for positive in (
        (0.7979,),
        (0.4528, 1.5104),
        (0.2451, 0.7560, 1.3439, 2.1519),
        (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
    )
]
"""For 1 to 4 bits: the 2^bits numbers with the least squared error for standard normal numbers (Lloyd, Max)."""


def rotate(block: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Rotate a block, float32 [D]: multiply by the first row of `signs` [count, D]; then for each other row apply
    H / sqrt(D), and multiply by that row.

    H is the Hadamard matrix of order D, a power of two. `signs` in reverse order give the inverse. The order of
    additions is fixed, so that both ends compute the same bits.
    """
    block = block * signs[0]
    for flips in signs[1:]:
        for _ in range(block.size.bit_length() - 1):
            first, second = block.reshape(2, -1)
            block = np.stack([first + second, first - second], axis=1).ravel()
        block = block * (flips * np.float32(block.size**-0.5))
    return block


@dataclass(frozen=True)
class EdenCodec(WholeTensorCodec):
    """Reads "seed" (uint64), and for each tensor "<name>.codes", `bits` bits for each entry of its padded blocks, and
    "<name>.scales", one fp32 a block."""

    bits: int
    rotations: int

    def blocks(self, size: int, seed: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """The slice of each block of a tensor of `size` entries, and its signs, float32 [rotations + 1, D].

        The last row of signs does not change the decoded numbers; with it `rotate` with reversed signs is the inverse.
        """
        draws = np.random.Generator(np.random.PCG64(int(seed[0])))
        start = 0
        while (rest := size - start) > 0:
            # At most 2^16 entries. A rest below 32 is padded, since one more block costs a scale of 32 bits.
            power = (rest - 1).bit_length() if rest < 32 else min(rest.bit_length() - 1, 16)
            flips = draws.integers(0, 2, (self.rotations + 1, 1 << power), dtype=np.int8)
            yield slice(start, start + (1 << power)), np.float32(1) - np.float32(2) * flips
            start += 1 << power

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        codes = parts[f"{name}.codes"]
        decoded = NUMBERS[self.bits - 1][packed_bits.unpack(codes, self.bits, 8 * codes.size // self.bits)]
        for scale, (span, signs) in zip(parts[f"{name}.scales"], self.blocks(size, parts[SEED]), strict=True):
            decoded[span] = np.clip(np.float64(scale) * rotate(decoded[span], signs[::-1]), -3.4e38, 3.4e38)
        return torch.from_numpy(decoded[:size])


class Eden(Quantizer, on_device=True):
    """S R^T q(R v): R is a random rotation, q rounds each entry to the nearest of 2^bits numbers, S is a scale.

    A tensor is cut into blocks of D = 2^16 entries, then blocks of the largest power of two that fits into the rest; a
    rest below 32 entries is padded with zeros. For a block x, z = R x and q = q(z sqrt(D) / ||x||). `rotations`: how
    often random signs and the Hadamard matrix over sqrt(D) are applied. Once is not enough for sparse tensors: then
    (2, 1, 0, ...) arrives as (2.5, 0, ...) whatever the signs are.
    `scale` "unbiased": S = ||x||^2 / <z, q>. With a uniform rotation C is unbiased, and E||C(v) - v||^2 / ||v||^2 is
    0.571, 0.133, 0.036 or 0.0096 with 1 to 4 bits. Random signs and Hadamard matrices approximate a uniform rotation in
    long blocks, but are not one, so no omega is stated. "least": S = <z, q> / ||q||^2, which has the least error for
    this q (0.363 with one bit and a uniform rotation). It is biased: wrap it in feedback.
    Bits: 64 for a seed, from which both ends draw the signs, 32 per block, and `bits` per entry, padding included, in
    whole bytes per tensor. Range: ValueError if S is too large for float32; decoded numbers are clipped to 3.4e38.
    Sources: Vargaftik, Ben-Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher, "EDEN: Communication-Efficient and
    Robust Distributed Mean Estimation for Federated Learning", ICML 2022; the same, "DRIVE: One-bit Distributed Mean
    Estimation", NeurIPS 2021. They rotate once and agree on the seed beforehand; the blocks are ours.
    """

    name = "eden"
    bits: int = Field(default=1, ge=1, le=4, description="bits per entry; 1 is DRIVE")
    scale: Literal["unbiased", "least"] = Field(
        default="unbiased", description="scale of a block: unbiased, or the one of least error (biased)"
    )
    rotations: int = Field(default=2, ge=1, le=8, description="how often signs and a Hadamard matrix are applied")

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """A seed, codes and scales. ValueError on NaN, infinity, and scales too large for float32."""
        codec = EdenCodec(shapes_of(x), self.bits, self.rotations)
        parts = {SEED: generator.integers(0, 1 << 64, 1, dtype=np.uint64)} if x else {}
        for name, tensor in x.items():
            flat = entries(name, tensor).numpy()
            sent = [self._encode_block(flat[span], signs) for span, signs in codec.blocks(flat.size, parts[SEED])]
            codes = np.concatenate([np.empty(0, np.uint8), *(codes for codes, _ in sent)])
            parts[f"{name}.codes"] = packed_bits.pack(codes, self.bits)
            parts[f"{name}.scales"] = entries(name, torch.tensor([scale for _, scale in sent])).numpy()
        return Packet(parts, codec), memory

    def _encode_block(self, x: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, float]:
        """The codes [D] and the scale of a block x, which is padded to the length of its signs."""
        x = np.pad(x.astype(np.float64), (0, signs.shape[1] - x.size))
        norm = math.sqrt(np.square(x).sum())
        root = math.sqrt(x.size)
        known = NUMBERS[self.bits - 1]
        rotated = rotate((x / (norm or 1.0)).astype(np.float32), signs) * np.float32(root)
        codes = np.searchsorted((known[1:] + known[:-1]) / 2, rotated, side="right")
        # The product is 0 for a block of zeros, whose scale is 0.
        product = float((rotated * known[codes]).sum(dtype=np.float64)) or 1.0
        squared = float(np.square(known[codes]).sum(dtype=np.float64))
        return codes.astype(np.uint8), norm * (root / product if self.scale == "unbiased" else product / root / squared)

    def expected_delta(self, num_entries: int) -> float | None:
        """With scale "least": 1/2 with one bit; with more, sqrt(2) c - c^2 for the best c of the magnitudes of q.

        Random signs suffice: an entry y of R x sqrt(D) / ||x|| has E|y| >= 1 / sqrt(2) (Szarek, "On the best constants
        in the Khinchin inequality", 1976). The nearest magnitude has an error of at most (|y| - c)^2, on average
        1 - 2 c E|y| + c^2. With one bit the scale makes that the least over all c, which is at c = 1 / sqrt(2).
        """
        return (
            max(
                0.5 * (self.bits == 1),
                *(math.sqrt(2) * magnitude - magnitude**2 for magnitude in NUMBERS[self.bits - 1].tolist()),
            )
            if self.scale == "least"
            else None
        )
