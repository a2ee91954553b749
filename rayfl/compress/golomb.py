"""Golomb-Rice code of sorted positions: the shortest prefix code of gaps if every entry is kept equally often.

A gap g (entries skipped since the last position) is g >> b zeros and a one, and the b low bits of g. In the buffer lie
first the low bits of all gaps, the highest bit of every gap before the second highest, then all zeros and ones; so
both ends work on whole arrays, and the code has the length of the usual one.
Source: Golomb, "Run-Length Encodings", IEEE Trans. Inf. Theory 1966; the choice of b: Sattler, Wiedemann, Mueller,
Samek, "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data", IEEE TNNLS 2019, Algorithm 3.
"""

import math

import numpy as np

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
MOST_LOW_BITS = 31


def low_bits(keep_ratio: float) -> int:
    """b* = max(0, 1 + floor(log2(ln(phi - 1) / ln(1 - p)))), at most 31, for a share p in (0, 1] of kept entries."""
    if keep_ratio >= 1:
        return 0
    b = 1 + math.floor(math.log2(math.log(GOLDEN_RATIO - 1) / math.log1p(-keep_ratio)))
    return min(max(0, b), MOST_LOW_BITS)


def encode_golomb(positions: np.ndarray, size: int, b: int) -> np.ndarray:
    """uint8 buffer of strictly increasing `positions` [count] in [0, size); empty if there are none or all of them.

    It has count * (b + 1) + sum(gaps >> b) bits, up to whole bytes.
    """
    count = positions.size
    if count in (0, size):
        return np.empty(0, np.uint8)
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum((gaps >> b) + 1)
    bits = np.zeros(count * b + int(ends[-1]), np.uint8)
    for index, plane in enumerate(bits[: count * b].reshape(b, count)):
        np.bitwise_and(gaps >> (b - 1 - index), 1, out=plane, casting="unsafe")
    bits[count * b - 1 + ends] = 1
    return np.packbits(bits)


def decode_golomb(buffer: np.ndarray, size: int, count: int, b: int) -> np.ndarray:
    """The inverse: int64 positions [count], increasing."""
    if count == 0:
        return np.empty(0, np.int64)
    if count == size:
        return np.arange(size)
    bits = np.unpackbits(buffer)
    gaps = np.diff(np.flatnonzero(bits[count * b :].view(np.bool_)), prepend=-1) - 1
    for plane in bits[: count * b].reshape(b, count):
        gaps = (gaps << 1) + plane
    return np.cumsum(gaps + 1) - 1
