"""Sparse ternary compression and the size of its packets by their definitions, in numpy."""

import math

import numpy as np

LOW_BITS = {0.05: 4, 0.1: 3, 0.4: 0, 1 / 400: 8, 1.0: 0}
"""b* by hand; see test_golomb.py."""


def stc(v: np.ndarray, keep_ratio: float) -> np.ndarray:
    """mu sign(v) on the k largest |v|, ties to the lowest index."""
    k = max(1, math.ceil(keep_ratio * v.size - 1e-9))
    chosen = np.argsort(-np.abs(v), kind="stable")[:k]
    result = np.zeros(v.size)
    result[chosen] = np.sign(v[chosen]) * np.float32(np.abs(v[chosen].astype(np.float64)).mean())
    return result


def num_bits(sent: np.ndarray, keep_ratio: float) -> int:
    """Of what `stc` gives: mu, signs and positions, each in whole bytes, and the count where some of the k are zero."""
    positions = np.flatnonzero(sent)
    gaps, b = np.diff(positions, prepend=-1) - 1, LOW_BITS[keep_ratio]
    golomb = 0 if positions.size == sent.size else math.ceil(sum(g // 2**b + 1 + b for g in gaps.tolist()) / 8)
    k = max(1, math.ceil(keep_ratio * sent.size - 1e-9))
    return 32 + 8 * math.ceil(positions.size / 8) + 8 * golomb + 32 * (positions.size < k)
