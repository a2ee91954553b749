"""Finds the entries of largest magnitude, exactly, with ties to the lowest position."""

import numpy as np
import torch
from torch import Tensor


def top_k_positions(x: np.ndarray, k: int) -> np.ndarray:
    """Increasing int64 positions [k] of the k largest |x| of finite float32 `x` [n], ties to the lowest position."""
    if k >= x.size:
        return np.arange(x.size)
    if k == 0:
        return np.empty(0, np.int64)
    magnitudes = np.abs(x)
    threshold = np.partition(magnitudes, x.size - k)[x.size - k]
    keep = magnitudes >= threshold
    surplus = int(np.count_nonzero(keep)) - k
    if surplus:
        tied = np.flatnonzero(magnitudes == threshold)
        keep[tied[tied.size - surplus :]] = False
    return np.flatnonzero(keep)


def top_k_mask(flat: Tensor, k: int) -> Tensor:
    """Boolean [n] with exactly k True, on the device of `flat`: the largest |entries|, ties to the lowest position."""
    if k == 0 or k >= flat.numel():
        return torch.full_like(flat, k > 0, dtype=torch.bool)
    magnitudes = flat.abs()
    threshold = torch.topk(magnitudes, k, sorted=False).values.min()
    above, tied = magnitudes > threshold, magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= k - above.sum()))
