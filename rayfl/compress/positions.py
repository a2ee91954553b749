"""Encodes sorted positions in the smallest of five exact codes.

- int32: four bytes per position.
- bitmap: ceil(size / 8) bytes.
- gaps: one byte per position, the number of entries skipped since the last one; 255 means "skip 255 and read on".
- packed: ceil(log2 size) bits per position.
- golomb: golomb.py's code, with the low bits that fit the density. This and packed are for few positions (`SPARSE`).

The last byte of a buffer names the code. If no position or every position is sent, the buffer is empty: the receiver
knows the number of values. At 10% density gaps are the smallest code (one byte per position), above 12.5% the bitmap.
If the receiver does not know the number, `encode_counted` spends a byte on "every position", and uses only the first
three codes, whose buffers tell the number.
"""

from collections.abc import Iterator

import numpy as np

from rayfl.compress.golomb import decode_golomb, encode_golomb, low_bits
from rayfl.errors import RayflError

INT32, BITMAP, GAPS, EVERY, PACKED, GOLOMB = 0, 1, 2, 3, 4, 5
SPARSE = 400
"""packed and golomb are tried if at most one in SPARSE entries is sent: gaps then have 1.5 escapes on average."""
ESCAPE = 255
MAX_SIZE = 2**31


def encode_positions(positions: np.ndarray, size: int) -> np.ndarray:
    """uint8 buffer of strictly increasing int64 `positions` [count] in [0, size), in the cheapest of the five codes.

    Raise RayflError for a size beyond 2^31.
    """
    plain = _encode_plainly(positions, size)
    count = positions.size
    if count == 0 or SPARSE * count > size:
        return plain
    # The highest bit of a position comes first.
    packed = _labelled(np.packbits((positions[:, None] & _powers((size - 1).bit_length())) != 0), PACKED)
    golomb = _labelled(encode_golomb(positions, size, low_bits(count / size)), GOLOMB)
    return min(plain, packed, golomb, key=len)


def _encode_plainly(positions: np.ndarray, size: int) -> np.ndarray:
    """The cheapest of int32, bitmap and gaps."""
    count = positions.size
    num_bitmap_bytes = -(-size // 8)
    if size > MAX_SIZE:
        raise RayflError(f"a tensor of {size} entries is too large for int32 positions; split it below {MAX_SIZE}")
    if count in (0, size):
        return np.empty(0, np.uint8)
    # A position takes at least one byte in the other codes, so their sizes need not be computed.
    if count >= num_bitmap_bytes:
        return _labelled(_bitmap(positions, size), BITMAP)
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // ESCAPE if gaps.max() >= ESCAPE else None
    num_gap_bytes = count if escapes is None else count + int(escapes.sum())
    if num_gap_bytes <= min(num_bitmap_bytes, 4 * count):
        return _labelled(_gap_bytes(gaps, escapes), GAPS)
    if num_bitmap_bytes <= 4 * count:
        return _labelled(_bitmap(positions, size), BITMAP)
    return _labelled(positions.astype(np.int32).view(np.uint8), INT32)


def _bitmap(positions: np.ndarray, size: int) -> np.ndarray:
    """uint8 [ceil(size / 8)], one bit per entry, the first in the highest bit."""
    mask = np.zeros(size, np.bool_)
    mask[positions] = True
    return np.packbits(mask)


def _gap_bytes(gaps: np.ndarray, escapes: np.ndarray | None) -> np.ndarray:
    """uint8: each gap as its escapes followed by its remainder. `escapes`: how many each gap needs; None: none."""
    if escapes is None:
        return gaps.astype(np.uint8)
    ends = np.cumsum(escapes + 1)
    body = np.full(int(ends[-1]), ESCAPE, np.uint8)
    body[ends - 1] = gaps % ESCAPE
    return body


def decode_positions(buffer: np.ndarray, size: int, count: int) -> np.ndarray:
    """The inverse: int64 positions [count], increasing."""
    if count == 0:
        return np.empty(0, np.int64)
    if count == size:
        return np.arange(size)
    code, body = buffer[-1], buffer[:-1]
    if code == INT32:
        return body.copy().view(np.int32).astype(np.int64)
    if code == BITMAP:
        return np.flatnonzero(_bits(body, size))
    if code == PACKED:
        width = (size - 1).bit_length()
        return np.unpackbits(body, count=count * width).reshape(count, width) @ _powers(width)
    if code == GOLOMB:
        return decode_golomb(body, size, count, low_bits(count / size))
    # A byte below 255 skips its gap and the position itself, an escape skips 255 entries.
    steps = np.cumsum(body, dtype=np.int64)
    if body.size != count:
        steps = steps[body != ESCAPE]
    return steps + np.arange(count)


def decode_mask(buffer: np.ndarray, size: int, count: int) -> np.ndarray:
    """The positions as a boolean array [size]; a bitmap is not turned into positions first."""
    if 0 < count < size and buffer[-1] == BITMAP:
        return _bits(buffer[:-1], size)
    mask = np.zeros(size, np.bool_)
    mask[decode_positions(buffer, size, count)] = True
    return mask


def cut_positions(buffer: np.ndarray, size: int, count: int, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """For each run of `length` entries, a multiple of 8, its own buffer and the number of positions in it."""
    is_bitmap = 0 < count < size and buffer[-1] == BITMAP
    bits = buffer[:-1] if is_bitmap else np.packbits(decode_mask(buffer, size, count))
    for first in range(0, size, length):
        body = bits[first // 8 : (first + length) // 8]
        yield _labelled(body, BITMAP), int(np.bitwise_count(body).sum())


def encode_counted(positions: np.ndarray, size: int) -> np.ndarray:
    """`encode_positions` for a receiver who does not know their number: one byte where every position is sent."""
    if 0 < size == positions.size:
        return np.array([EVERY], np.uint8)
    return _encode_plainly(positions, size)


def decode_counted(buffer: np.ndarray, size: int) -> np.ndarray:
    """The inverse of `encode_counted`: int64 positions, increasing."""
    if buffer.size == 0:
        return np.empty(0, np.int64)
    code, body = buffer[-1], buffer[:-1]
    if code == EVERY:
        return np.arange(size)
    if code == BITMAP:
        return np.flatnonzero(_bits(body, size))
    count = body.size // 4 if code == INT32 else int(np.count_nonzero(body != ESCAPE))
    return decode_positions(buffer, size, count)


def _bits(body: np.ndarray, size: int) -> np.ndarray:
    """A bitmap as a boolean array [size]."""
    return np.unpackbits(body, count=size).view(np.bool_)


def _powers(width: int) -> np.ndarray:
    """int64 2^(width - 1), ..., 2, 1."""
    return np.left_shift(np.int64(1), np.arange(width - 1, -1, -1))


def _labelled(body: np.ndarray, code: int) -> np.ndarray:
    return np.append(body, np.uint8(code))
