"""Packs small numbers into few bits: fixed width, ternary digits, and Elias gamma codes.

- Fixed width: entry i takes the bits [i * width, (i + 1) * width) of the buffer, the lowest bit of a byte first; beyond
  8 bits the low bytes lie in front and the rest is packed behind them.
- Ternary digits: five a byte (3^5 = 243), 1.6 bits each.
- Elias gamma: a number n >= 1 of 1 + k binary digits is k zeros, a one, and its k lower digits, 2k + 1 bits.
  The zeros and ones of all numbers lie in one buffer and the lower digits in another one, so that both can be read
  without walking from number to number.
"""

import numpy as np

MAX_WIDTH = 16
TRITS_PER_BYTE = 5


def pack(codes: np.ndarray, width: int) -> np.ndarray:
    """uint8 [ceil(n * width / 8)] of uint8 or uint16 `codes` [n] below 2^width, for a width from 1 to 16."""
    assert 1 <= width <= MAX_WIDTH, width
    if width > 8:
        low, high = (codes & 0xFF).astype(np.uint8), (codes >> 8).astype(np.uint8)
        return np.concatenate([low, pack(high, width - 8)])
    planes = np.unpackbits(codes.astype(np.uint8, copy=False)[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(planes, bitorder="little")


def unpack(buffer: np.ndarray, width: int, count: int) -> np.ndarray:
    """The inverse: codes [count], uint8 for widths up to 8 and uint16 beyond."""
    if width > 8:
        low, high = buffer[:count], unpack(buffer[count:], width - 8, count)
        return low | (high.astype(np.uint16) << 8)
    planes = np.unpackbits(buffer, count=count * width, bitorder="little").reshape(count, width)
    return planes @ (1 << np.arange(width)).astype(np.uint8)


def pack_trits(digits: np.ndarray) -> np.ndarray:
    """uint8 [m], m = ceil(n / 5), of uint8 `digits` [n] below 3; byte j holds the entries j, j + m, ..., j + 4m."""
    num_packed = -(-digits.size // TRITS_PER_BYTE)
    packed = np.zeros(num_packed, np.uint8)
    for power in reversed(range(TRITS_PER_BYTE)):
        packed *= 3
        plane = digits[power * num_packed : (power + 1) * num_packed]
        packed[: plane.size] += plane
    return packed


def unpack_trits(buffer: np.ndarray, count: int) -> np.ndarray:
    """The inverse: uint8 [count]."""
    digits = np.empty((TRITS_PER_BYTE, buffer.size), np.uint8)
    rest = buffer
    for plane in digits:
        higher = rest // np.uint8(3)
        np.subtract(rest, higher * np.uint8(3), out=plane)
        rest = higher
    return digits.reshape(-1)[:count]


def random_bits(count: int, generator: np.random.Generator) -> np.ndarray:
    """uint32 [count] of independent bits."""
    return generator.integers(0, 1 << 64, -(-count // 2), dtype=np.uint64).view(np.uint32)[:count]


def encode_gamma(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elias gamma codes of int64 `numbers` [n], each from 1 to 2^31: the buffers of their prefixes and lower digits.

    The prefixes end with the last one, so that the receiver can count the numbers.
    """
    # The exponent of a float64, which holds such numbers exactly, is the number of binary digits.
    num_digits = np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 1
    ends = np.cumsum(num_digits + 1)
    prefixes = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    prefixes[ends - 1] = 1
    owners, shifts = _lower_digits(num_digits)
    return np.packbits(prefixes), np.packbits((numbers[owners] >> shifts & 1).astype(np.uint8))


def decode_gamma(prefixes: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """The inverse: int64 numbers [n]."""
    ends = np.flatnonzero(np.unpackbits(prefixes).view(np.bool_))
    num_digits = np.diff(ends, prepend=-1) - 1
    numbers = np.int64(1) << num_digits
    owners, shifts = _lower_digits(num_digits)
    np.add.at(numbers, owners, np.unpackbits(digits, count=owners.size).astype(np.int64) << shifts)
    return numbers


def _lower_digits(num_digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number that each lower digit belongs to, and its place in it; the highest digit of a number comes first."""
    owners = np.repeat(np.arange(num_digits.size), num_digits)
    return owners, np.cumsum(num_digits)[owners] - 1 - np.arange(owners.size)
