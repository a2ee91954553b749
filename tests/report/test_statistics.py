"""Paired differences against scipy's own test and closed forms; Holm's correction against his procedure."""

import math

import numpy as np
import pytest
from scipy import stats

from rayfl.report.statistics import Paired, holm, paired

DIFFERENCES = [0.012, -0.004, 0.021, 0.009, 0.015]


def test_interval_and_p_are_those_of_scipys_one_sample_test():
    found, expected = paired(DIFFERENCES), stats.ttest_1samp(DIFFERENCES, 0)
    _, p = expected
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(DIFFERENCES))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(p)
    assert found.num_pairs == 5


def test_two_pairs_have_the_closed_form_of_one_degree_of_freedom():
    # n = 2: t = mean / (|a - b| / 2), and Student's t with 1 degree of freedom is Cauchy: p = 1 - 2 atan(t) / pi.
    found = paired([1.0, 4.0])
    assert found.p == pytest.approx(1 - 2 * math.atan(2.5 / 1.5) / math.pi)
    assert found.high - found.mean == pytest.approx(1.5 * math.tan(math.pi * 0.475))


@pytest.mark.parametrize("num", [2, 5, 30])
def test_a_detectable_difference_is_found_with_power_080(num):
    values = np.random.default_rng(num).normal(size=num)
    shift = paired(values).detectable / (values.std(ddof=1) / math.sqrt(num))
    critical = stats.t.isf(0.025, num - 1)
    assert stats.nct.sf(critical, num - 1, shift) == pytest.approx(0.8, abs=1e-6)


def test_many_pairs_detect_as_the_normal_distribution_says():
    # As n grows: (z_0.975 + z_0.8) * deviation / sqrt(n).
    values = np.random.default_rng(0).normal(size=20_000)
    expected = (stats.norm.isf(0.025) + stats.norm.isf(0.2)) * values.std(ddof=1) / math.sqrt(len(values))
    assert paired(values).detectable == pytest.approx(expected, rel=1e-3)


def test_a_single_pair_has_a_mean_and_nothing_else():
    assert np.isnan(paired([])[:5]).all()
    found = paired([0.5, math.nan])
    assert (found.mean, found.num_pairs) == (0.5, 1)
    assert np.isnan(found[1:5]).all()


def test_an_infinite_difference_gives_no_interval_and_no_warning():
    found = paired([math.inf, 1.0, 2.0])
    assert found.mean == math.inf
    assert np.isnan(found[1:5]).all()


def test_equal_differences_are_their_own_interval():
    assert paired([2.0, 2.0, 2.0]) == Paired(2.0, 2.0, 2.0, 0.0, 0.0, 3)
    assert paired([0.0, 0.0]) == Paired(0.0, 0.0, 0.0, 1.0, 0.0, 2)


def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less():
    # Sorted 0.01, 0.02, 0.03: 3 * 0.01, 2 * 0.02, and 0.03 raised to the largest before it, 0.04.
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_nan_out():
    adjusted = holm([math.nan, 0.02, 0.01])
    assert math.isnan(adjusted[0])
    assert adjusted[1:] == pytest.approx([0.02, 0.02])


def test_holm_rejects_what_his_sequence_of_tests_rejects():
    p = np.random.default_rng(3).uniform(size=12) ** 3
    rejected = set()
    for step, index in enumerate(np.argsort(p)):
        if p[index] > 0.05 / (len(p) - step):
            break
        rejected.add(int(index))
    assert 0 < len(rejected) < len(p)
    assert {index for index, value in enumerate(holm(p)) if value <= 0.05} == rejected
