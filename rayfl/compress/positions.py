"""Sorted positions in the cheapest of three exact codes, billed to the last byte.

- int32: four bytes a position.
- bitmap: ceil(size / 8) bytes.
- gaps: one byte a position, the number of positions skipped since the last one; 255 means "skip 255 and read on".

The last byte of a buffer names the code. No position and every position need no bytes: the receiver knows both from
the number of values. At 10% density gaps are the cheapest (one byte a position), above 12.5% the bitmap.
"""

import numpy as np

INT32, BITMAP, GAPS = 0, 1, 2
ESCAPE = 255
MAX_SIZE = 2**31


def encode_positions(positions: np.ndarray, size: int) -> np.ndarray:
    """uint8 buffer of strictly increasing `positions` [count] in [0, size). ValueError for size beyond 2^31."""
    count = positions.size
    if size > MAX_SIZE:
        raise ValueError(f"a tensor of {size} entries is too large for int32 positions; split it below {MAX_SIZE}")
    if count in (0, size):
        return np.empty(0, np.uint8)
    num_bitmap_bytes = -(-size // 8)
    # A position takes at least one byte in the other codes: no need to look at the gaps.
    if count >= num_bitmap_bytes:
        return _labelled(_bitmap(positions, size), BITMAP)
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // ESCAPE if gaps.max() >= ESCAPE else None
    num_gap_bytes = count + (0 if escapes is None else int(escapes.sum()))
    if num_gap_bytes <= min(num_bitmap_bytes, 4 * count):
        return _labelled(gaps if escapes is None else _with_escapes(gaps, escapes), GAPS)
    if num_bitmap_bytes <= 4 * count:
        return _labelled(_bitmap(positions, size), BITMAP)
    return _labelled(positions.astype(np.int32).view(np.uint8), INT32)


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
        return np.flatnonzero(np.unpackbits(body, count=size).view(np.bool_))
    # A byte below 255 passes over its gap and the position itself, an escape over 255 entries.
    steps = np.cumsum(body, dtype=np.int64)
    if body.size == count:
        return steps + np.arange(count)
    found = body != ESCAPE
    return steps[found] + np.arange(count)


def _bitmap(positions: np.ndarray, size: int) -> np.ndarray:
    mask = np.zeros(size, np.bool_)
    mask[positions] = True
    return np.packbits(mask)


def _with_escapes(gaps: np.ndarray, escapes: np.ndarray) -> np.ndarray:
    """Each gap as its escapes followed by its remainder."""
    ends = np.cumsum(escapes + 1)
    body = np.full(int(ends[-1]), ESCAPE, np.uint8)
    body[ends - 1] = gaps % ESCAPE
    return body


def _labelled(body: np.ndarray, code: int) -> np.ndarray:
    buffer = np.empty(body.size + 1, np.uint8)
    buffer[:-1] = body
    buffer[-1] = code
    return buffer
