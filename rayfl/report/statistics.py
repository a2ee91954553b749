"""Paired comparisons over seeds: Student's interval and test, the power of the test, and Holm's correction."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
"""The level of tests; intervals cover 1 - LEVEL."""
POWER = 0.8
"""The power at which a difference counts as detectable."""


class Paired(NamedTuple):
    """Differences between pairs of runs, matched by seed.

    mean: their mean. low, high: its 95 % interval by Student's t. p: of the two-sided paired t-test that it is 0.
    detectable: the smallest true difference that this test, at level 0.05, finds with power 0.8 if the true deviation
    is the observed one. num_pairs: the number of differences.
    """

    mean: float
    low: float
    high: float
    p: float
    detectable: float
    num_pairs: int


def paired(differences: Sequence[float] | np.ndarray) -> Paired:
    """Estimate the mean of paired differences. NaN, the difference of an incomplete pair, is left out.

    With fewer than two pairs all but the mean is NaN. If all differences are equal, the true deviation is taken to be
    0 too: the interval is the mean alone, p is 0 (1 if the mean is 0), and any difference is detectable.
    """
    # scipy.special is imported here because not every table needs it; scipy.stats would take a second to load.
    from scipy.special import nctdtrinc, stdtr, stdtrit

    values = np.asarray(differences, float)
    values = values[~np.isnan(values)]
    num, mean = len(values), float(values.mean()) if len(values) else np.nan
    if num < 2:
        return Paired(mean, np.nan, np.nan, np.nan, np.nan, num)
    if np.ptp(values) == 0:
        return Paired(mean, mean, mean, float(mean == 0), 0.0, num)
    # Where a run has diverged, the mean is infinite and the rest NaN.
    with np.errstate(invalid="ignore"):
        error, critical = values.std(ddof=1) / np.sqrt(num), stdtrit(num - 1, 1 - LEVEL / 2)
    # With noncentrality c the statistic exceeds the critical value with probability POWER; at c the other tail, a
    # difference found with the wrong sign, is below 1e-5 and left out.
    detectable = nctdtrinc(num - 1, 1 - POWER, critical) * error
    p = 2 * stdtr(num - 1, -abs(mean / error))
    low, high = mean - critical * error, mean + critical * error
    return Paired(mean, float(low), float(high), float(p), float(detectable), num)


def holm(p_values: Sequence[float] | np.ndarray) -> list[float]:
    """Holm's adjusted p-values (1979). NaN stays NaN and is not counted as a test.

    Reject the hypotheses whose adjusted p-value is at most a level: the probability of any false rejection is then at
    most that level.
    """
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind="stable")[: np.count_nonzero(~np.isnan(p))]
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1)
    return adjusted.tolist()
