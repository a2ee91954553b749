"""With and without a switched setting: which runs make a pair, and the paired difference."""

import math

import pytest

from rayfl.metrics.facts import ACCURACY as FACTS
from rayfl.report import wording
from rayfl.report.ablations import ablations, difference, pairs, points
from rayfl.report.groups import Score, groups
from tests.hand_written import ACCURACY, run_of

ELASTIC = {"tau": 0.5, "mu": 0.95}


def run(path, value, seed=1, name="fedavg", **method):
    label = f"{name}, {', '.join(f'{key}={value}' for key, value in method.items())}"
    return run_of(path, {0: value}, seed=seed, method={"name": name, **method}, label=label)


def found_in(*settings: dict):
    return lambda tmp_path: groups(
        [run_of(tmp_path / str(n), {0: 0.5}, label=str(n), **one) for n, one in enumerate(settings)]
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # A table that is there or not, whatever else is named alike.
        (
            [{"method": {"elastic_x": 1}}, {"method": {"elastic_x": 1, "elastic": ELASTIC}}],
            [("method.elastic", "0", "1")],
        ),
        ([{"method": {"elastic": ELASTIC}}, {"method": {"elastic": None}}], [("method.elastic", "1", "0")]),
        # true beside false, and beside nothing.
        ([{"own": False}, {"own": True}], [("own", "0", "1")]),
        ([{"own": True}, {"x": None}], [("own", "1", "0")]),
        # Two values, neither of which is off: 0 is a value.
        ([{"mu": 0}, {"mu": 1}], []),
        ([{"method": {"name": "a"}}, {"method": {"name": "b", "elastic": ELASTIC}}], []),
        # Two settings at once, in one table or in two.
        ([{"method": {"name": "a"}}, {"method": {"name": "a", "x": True, "y": True}}], []),
        ([{}, {"a": {"lr": 1}, "b": {"lr": 1}}], []),
        # Two ways to switch it on.
        (
            [{}, {"elastic": {**ELASTIC, "tau": 0.1}}, {"elastic": ELASTIC}],
            [("elastic", "0", "1"), ("elastic", "0", "2")],
        ),
        # Not what says which run it is.
        ([{"output": {"report": True}}, {"output": {"report": False}, "clip": 1}], [("clip", "0", "1")]),
    ],
)
def test_a_pair_differs_in_one_setting_that_is_off_and_on(tmp_path, settings, expected):
    found = found_in(*settings)(tmp_path)
    assert [(pair.setting, pair.off.label, pair.on.label) for pair in pairs(found)] == expected


def test_what_was_tuned_may_differ_within_a_pair(tmp_path):
    found = found_in({"method": {"lr": 0.1}}, {"method": {"lr": 0.2, "elastic": ELASTIC}})(tmp_path)
    assert pairs(found) == []
    assert [pair.setting for pair in pairs(found, ["method.lr"])] == ["method.elastic"]


def test_the_difference_is_taken_seed_by_seed(tmp_path):
    # Seeds 1 to 3 gain 0.1, 0.2 and -0.15; 4 and 5 have no partner.
    off = {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.99}
    on = {3: 0.55, 2: 0.8, 1: 0.6, 5: 0.01}
    runs = [run(tmp_path / f"off{seed}", value, seed) for seed, value in off.items()]
    runs += [run(tmp_path / f"on{seed}", value, seed, elastic=ELASTIC) for seed, value in on.items()]
    (pair,) = pairs(groups(runs))
    found = difference(pair, ACCURACY, 3, FACTS)
    assert (found.off.mean, found.on.mean) == (pytest.approx(0.6), pytest.approx(0.65))
    assert (found.difference.mean, found.difference.count, found.better) == (pytest.approx(0.05), 3, 2)
    # Squares of the gains' distances from 0.05: 0.0025 + 0.0225 + 0.04 = 0.065, over n - 1.
    assert found.difference.deviation == pytest.approx(math.sqrt(0.065 / 2))
    (table,) = ablations(groups(runs), [ACCURACY, "own/accuracy"], 3)
    assert table["setting"] == "method.elastic"
    heads = table["head"]
    assert isinstance(heads, list) and len(heads) == 6 and wording.title("own/accuracy") in heads[-1]
    rows = table["rows"]
    assert isinstance(rows, list)
    # Deviations without and with: sqrt((0.01 + 0 + 0.01) / 2) = 0.1, sqrt((0.01 + 0.0225 + 0.0025) / 2) = 0.1323.
    assert rows[0][1] == [
        "60.0 \u00b1 10.0 % (3)",
        "65.0 \u00b1 13.2 % (3)",
        "+5.00 \u00b1 18.03 (3)",
        "2 of 3",
        "\u2013",
    ]


def test_the_mean_of_the_last_evaluations_is_compared(tmp_path):
    runs = [
        run_of(tmp_path / "off", {0: 0.9, 1: 0.1, 2: 0.3}, own=False),
        run_of(tmp_path / "on", {0: 0.0, 1: 0.2, 2: 0.6}, own=True),
    ]
    (pair,) = pairs(groups(runs))
    assert [difference(pair, ACCURACY, last, FACTS).difference.mean for last in (1, 2)] == pytest.approx([0.3, 0.2])


def test_sides_without_a_seed_in_common_make_no_row(tmp_path):
    runs = [run(tmp_path / "off", 0.5, 1), run(tmp_path / "on", 0.6, 2, elastic=ELASTIC)]
    assert len(pairs(groups(runs))) == 1
    assert ablations(groups(runs), [ACCURACY], 3) == []


def test_each_host_has_a_row_named_by_the_run_without(tmp_path):
    runs = [
        one
        for name in ("fedavg", "fedpd")
        for one in (
            run(tmp_path / f"{name}-off", 0.5, name=name),
            run(tmp_path / f"{name}-on", 0.6, name=name, elastic=ELASTIC),
        )
    ]
    (table,) = ablations(groups(runs), [ACCURACY], 3)
    rows = table["rows"]
    assert isinstance(rows, list)
    assert [(one.label, cells[2]) for one, cells in rows] == [("fedavg, ", "+10.00 (1)"), ("fedpd, ", "+10.00 (1)")]


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (Score(0.0123, 0.004, 3), "+1.23 \u00b1 0.40 (3)"),
        (Score(-0.0123, 0.004, 3), "\u22121.23 \u00b1 0.40 (3)"),
        (Score(0.0, 0.0, 2), "0.00 \u00b1 0.00 (2)"),
        (Score(math.nan, 0.0, 0), "\u2013"),
    ],
)
def test_points(score, words):
    assert points(score, FACTS) == words
