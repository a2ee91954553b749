"""Paired differences against scipy's own test and closed forms; Holm's correction against his procedure; ranks
against Demsar's tables."""

import math

import numpy as np
import pytest
from scipy import stats

from rayfl.report.statistics import Paired, holm, paired, ranked, signed_rank

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


def test_five_pairs_of_one_sign_have_the_smallest_p_of_a_signed_rank_test():
    # Two of the 2**5 ways to choose the signs are as extreme.
    assert signed_rank([0.1, 0.3, 0.2, 0.5, 0.4, math.nan]) == pytest.approx(2 / 2**5)
    # Ties share the ranks 1 and 2: the sum is 4.5, and 3 of the 2**3 ways give 4.5 or more, 3 of them 1.5 or less.
    assert signed_rank([1.0, -1.0, 2.0]) == pytest.approx(6 / 2**3)
    assert signed_rank([0.0] * 20) == signed_rank([0.0, 0.0]) == 1.0
    assert math.isnan(signed_rank([0.3, math.nan])) and math.isnan(signed_rank([]))


@pytest.mark.parametrize("num", [4, 8, 13, 14, 40])
def test_the_signed_rank_test_is_scipys_exact_one(num):
    values = np.random.default_rng(num).normal(0.3, size=num)
    assert signed_rank(values) == pytest.approx(stats.wilcoxon(values, method="exact")[1])


# Accuracies of C4.5, and of C4.5 with m tuned, on 14 data sets: Demsar, JMLR 2006, table 2.
C45 = [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957]
C45_M = [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978]


def test_two_methods_are_compared_as_in_demsars_example_of_wilcoxons_test():
    found = ranked(np.array([C45, C45_M]).T)
    # The sums of ranks are 93 and 12: z = (12 - 14 * 15 / 4) / sqrt(14 * 15 * 29 / 24) = -2.54.
    assert found.p == pytest.approx(2 * stats.norm.sf(2.54), abs=4e-4)
    assert (found.num_data, found.critical, found.is_too_few) == (14, 0.0, False)
    assert found.differs.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("num_methods", "q"),
    [(3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (9, 3.102), (10, 3.164)],
)
def test_critical_differences_are_those_of_demsars_table(num_methods, q):
    values = np.random.default_rng(num_methods).normal(size=(14, num_methods))
    expected = q * math.sqrt(num_methods * (num_methods + 1) / (6 * 14))
    assert ranked(values).critical == pytest.approx(expected, rel=5e-4)


def test_friedmans_test_is_scipys_and_only_after_it_ranks_are_told_apart():
    values = np.random.default_rng(1).normal([0, 0, 0.5, 4], size=(8, 4))
    found = ranked(values)
    assert found.ranks == pytest.approx(stats.rankdata(-values, axis=1).mean(axis=0))
    assert found.p == pytest.approx(stats.friedmanchisquare(*values.T)[1]) and found.p < 0.05
    assert found.differs[3].tolist() == (found.ranks - found.ranks[3] >= found.critical).tolist()
    assert found.differs[3].any() and not found.differs.diagonal().any()
    # Demsar's critical difference may be reached where Friedman's test finds nothing.
    assert not found._replace(p=0.06).differs.any()


def test_ties_share_ranks_and_missing_values_leave_a_data_set_out():
    found = ranked(np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0], [3.0, math.nan, 9.0]]))
    assert (found.ranks.tolist(), found.num_data) == ([1.75, 1.75, 2.5], 2)
    assert ranked(np.ones((5, 3))).p == 1.0 and not ranked(np.ones((5, 3))).differs.any()


def test_too_few_data_sets_are_said():
    best_of_all = [ranked(np.tile(np.arange(3.0), (number, 1))) for number in range(5)]
    # With two data sets the critical difference of 2.34 exceeds 2, the largest difference of average ranks.
    assert [one.is_too_few for one in best_of_all] == [True, True, True, False, False]
    assert math.isnan(best_of_all[1].p) and np.isnan(best_of_all[0].ranks).all()
    two = [ranked(np.tile(np.arange(2.0), (number, 1))).is_too_few for number in range(1, 8)]
    assert two == [True] * 5 + [False] * 2
