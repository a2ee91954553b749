"""Paired comparisons over seeds: Student's interval and test, the power of the test, equivalence, Wilcoxon's test and
Holm's correction; and ranks of methods over data sets (Demsar, JMLR 2006)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayfl.untyped import Foreign

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

    values = _defined(differences)
    num = len(values)
    mean = float(values.mean()) if num else np.nan
    if num < 2:
        return Paired(mean, np.nan, np.nan, np.nan, np.nan, num)
    if np.ptp(values) == 0:
        return Paired(mean, mean, mean, float(mean == 0), 0.0, num)
    # Where a run has diverged, the mean is infinite and the rest NaN.
    with np.errstate(invalid="ignore"):
        error = values.std(ddof=1) / np.sqrt(num)
        critical = stdtrit(num - 1, 1 - LEVEL / 2)
    # With noncentrality c the statistic exceeds the critical value with probability POWER; at c the other tail, a
    # difference found with the wrong sign, is below 1e-5 and left out.
    detectable = nctdtrinc(num - 1, 1 - POWER, critical) * error
    p = 2 * stdtr(num - 1, -abs(mean / error))
    low, high = mean - critical * error, mean + critical * error
    return Paired(mean, float(low), float(high), float(p), float(detectable), num)


def _defined(differences: Sequence[float] | np.ndarray) -> np.ndarray:
    """Those of complete pairs."""
    values = np.asarray(differences, float)
    return values[~np.isnan(values)]


def equivalence(seen: Paired, margin: float) -> tuple[float, float]:
    """The p-values that a true difference lies inside [-margin, margin], and that it lies outside.

    inside: two one-sided t-tests, the larger p (Schuirmann 1987). outside: the t-test against the nearer bound, doubled
    because either bound may be the one. With p NaN (fewer than two pairs) both are NaN.
    """
    from scipy.special import stdtr, stdtrit

    if np.isnan(seen.p):
        return np.nan, np.nan
    error = (seen.high - seen.mean) / stdtrit(seen.num_pairs - 1, 1 - LEVEL / 2)
    excess = abs(seen.mean) - margin
    if error == 0:
        return float(excess > 0), float(excess <= 0)
    inside = float(stdtr(seen.num_pairs - 1, excess / error))
    return inside, min(1.0, 2 * (1 - inside))


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


_FEW_PAIRS = 13
"""With at most this number of pairs, all signs are tried: 2**13 is less than scipy's 9,999 permutations."""


def signed_rank(differences: Sequence[float] | np.ndarray) -> float:
    """The p-value of Wilcoxon's two-sided signed-rank test that paired differences lie symmetrically about 0.

    Ranks of zeros are split between both signs. With at most 13 pairs the p-value is exact, and at least 2 ** (1 - n);
    with more it is exact if no difference is 0 or equal to another, otherwise a normal approximation. NaN, the
    difference of an incomplete pair, is left out; with fewer than two pairs p is NaN.
    """
    from scipy.stats import PermutationMethod, wilcoxon

    values = _defined(differences)
    if len(values) < 2 or not values.any():
        return 1.0 if len(values) > 1 else np.nan
    method = PermutationMethod() if len(values) <= _FEW_PAIRS else "auto"
    # scipy's annotations know neither a method that is no text nor the result's fields.
    test: Foreign = wilcoxon
    return float(test(values, zero_method="zsplit", method=method).pvalue)


class Ranked(NamedTuple):
    """Methods compared over data sets by their ranks.

    ranks: the average rank of each method, [num_methods]; 1 is the best, and methods that tie share the mean of their
    ranks. p: of Friedman's test that all methods are alike, or of Wilcoxon's for two methods; NaN with fewer than two
    data sets. critical: Nemenyi's critical difference at level 0.05, by which the average ranks of two of several
    methods must differ; 0 for two methods, whose test decides alone. num_data: the number of data sets.
    """

    ranks: np.ndarray
    p: float
    critical: float
    num_data: int

    @property
    def is_too_few(self) -> bool:
        """Whether no values on as few data sets could reach the level, also if one method is best on all of them."""
        least_p = 2.0 ** (1 - self.num_data) if len(self.ranks) == 2 else 0.0
        return self.num_data < 2 or self.critical > len(self.ranks) - 1 or least_p > LEVEL

    @property
    def differs(self) -> np.ndarray:
        """Whether each two methods are told apart, bool [num_methods, num_methods]: the test rejects that all methods
        are alike, and the average ranks of the two differ by the critical difference or more."""
        apart = np.abs(self.ranks[:, None] - self.ranks)
        return (apart >= self.critical) & (apart > 0) & (self.p <= LEVEL)


def ranked(values: np.ndarray) -> Ranked:
    """Compare methods by `values` [num_data, num_methods], of which larger ones are better.

    Data sets that lack the value of a method (NaN) are left out. At least two methods.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    values = values[~np.isnan(values).any(axis=1)]
    num_data, num_methods = values.shape
    ranks = rankdata(-values, axis=1)
    means = ranks.mean(axis=0) if num_data else np.full(num_methods, np.nan)
    if num_data < 2:
        return Ranked(means, np.nan, np.nan, num_data)
    if num_methods == 2:
        return Ranked(means, signed_rank(values[:, 0] - values[:, 1]), 0.0, num_data)
    # If all methods tie on every data set, the statistic is 0 / 0.
    p = float(friedmanchisquare(*ranks.T).pvalue) if np.ptp(ranks) else 1.0
    error = np.sqrt(num_methods * (num_methods + 1) / (12 * num_data))
    return Ranked(means, p, float(studentized_range.ppf(1 - LEVEL, num_methods, np.inf) * error), num_data)
