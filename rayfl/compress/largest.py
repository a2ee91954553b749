"""Finds the entries of largest magnitude, exactly, with ties to the lowest position."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from rayfl.data.device import upload

SAMPLE_SIZE = 1 << 16
CHUNK = 1 << 16
"""Entries compared at a time, so that they fit into the processor's cache."""


def top_k_positions(x: np.ndarray, k: int) -> np.ndarray:
    """Increasing int64 positions [k] of the k largest |x| of finite float32 `x` [n], ties to the lowest position."""
    if k >= x.size:
        return np.arange(x.size)
    if k == 0:
        return np.empty(0, np.int64)
    candidates = _candidates(x, k)
    magnitudes = np.abs(x[candidates])
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    keep = magnitudes >= threshold
    surplus = int(np.count_nonzero(keep)) - k
    if surplus:
        tied = np.flatnonzero(magnitudes == threshold)
        keep[tied[tied.size - surplus :]] = False
    return candidates[keep]


def top_k_mask(flat: torch.Tensor, k: int) -> torch.Tensor:
    """Boolean [n] with exactly k True, on the device of `flat`: the largest |entries|, ties to the lowest position."""
    if k == 0 or k >= flat.numel():
        return torch.full_like(flat, k > 0, dtype=torch.bool)
    magnitudes = flat.abs()
    if magnitudes.is_cpu:
        # The same number in a tenth of the time.
        threshold = float(np.partition(magnitudes.numpy(), -k)[-k])
    else:
        threshold = torch.topk(magnitudes, k, sorted=False).values.min()
    above, tied = magnitudes > threshold, magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= k - above.sum()))


def top_k_of_each(flat: torch.Tensor, sizes: Sequence[int], kept: Sequence[int]) -> torch.Tensor:
    """Increasing int64 positions of the largest |entries| of each piece of finite float32 `flat` [sum of `sizes`].

    Keeps kept[i] of the piece of sizes[i], ties to the lowest position. All pieces are sorted by the same operations.
    """
    pieces = np.stack([np.arange(len(sizes)) << 32, np.array(sizes)])
    keys, lengths = upload(pieces, flat.device).unbind()
    # Of finite numbers without a sign the bits have the order of the numbers. Pieces come one after another.
    magnitudes = flat.abs().view(torch.int32)
    sort_keys = torch.repeat_interleave(keys, lengths, output_size=len(flat)).sub_(magnitudes)
    order = torch.sort(sort_keys, stable=True).indices.split(list(sizes))
    return torch.cat([piece[:k] for piece, k in zip(order, kept, strict=True)]).sort().values


def _candidates(x: np.ndarray, k: int) -> np.ndarray:
    """Positions of all entries that can be among the k largest: those above a magnitude that at least k entries reach.

    The magnitude is estimated from an example, four standard deviations on the safe side, so that the exact selection
    works on little more than k entries. If the estimate is wrong, all positions are candidates.
    """
    if x.size < 4 * SAMPLE_SIZE:
        return np.arange(x.size)
    sample = np.abs(x[:: x.size // SAMPLE_SIZE])
    expected = k * sample.size / x.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= sample.size:
        return np.arange(x.size)
    low = np.partition(sample, sample.size - rank)[sample.size - rank]
    candidates = np.flatnonzero(at_least(x, low))
    return candidates if candidates.size >= k else np.arange(x.size)


def at_least(x: np.ndarray, low: np.float32) -> np.ndarray:
    """Boolean [n]: |x| >= low."""
    mask = np.empty(x.size, np.bool_)
    magnitudes = np.empty(min(CHUNK, x.size), np.float32)
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK]
        magnitude = np.abs(piece, out=magnitudes[: piece.size])
        np.greater_equal(magnitude, low, out=mask[start : start + CHUNK])
    return mask
