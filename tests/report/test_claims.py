"""Verdicts on claims: the rule, which runs are compared, and what is refused before anything runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rayfl.report.claims import Choices, Claim, assess, check, verdicts_markdown
from rayfl.run_directory.record import Run
from tests.hand_written import ACCURACY, run_of
from tests.refusals import refused

Runs = list[tuple[Choices, Run]]


def claim(**given) -> Claim:
    return Claim(**{"id": "one", "says": "A beats B", "sweep": "small", "value": f"{ACCURACY}:final", **given})


def runs_of(folder: Path, values: Mapping[str, Sequence[float | None]], key: str = "case") -> Runs:
    """A run for each value of a swept key and each seed, which ends at a given accuracy (None: never evaluated)."""
    return [
        (
            {key: word, "seed": str(seed)},
            run_of(folder / f"{word}-{seed}", {} if end is None else {0: 0.0, 1: end}, rounds=2, seed=seed, label=word),
        )
        for word, ends in values.items()
        for seed, end in enumerate(ends)
    ]


# Any: a row of a data frame.
def verdict(of: Claim, runs: Runs) -> Any:
    """The one row of the verdicts."""
    check(of, {"small": [choices for choices, _ in runs]})
    (found,) = assess([of], {"small": runs}).iloc
    return found


A_AND_B = {"better": {"case": "A"}, "than": {"case": "B"}}


@pytest.mark.parametrize(
    ("given", "ends", "expected"),
    [
        ({}, [0.6, 0.7, 0.8], "reproduced"),
        ({"sign": "<"}, [0.6, 0.7, 0.8], "refuted"),
        ({}, [0.1, 0.2, 0.1], "refuted"),
        ({"sign": "<"}, [0.1, 0.2, 0.1], "reproduced"),
        ({}, [0.9, 0.1, 0.5], "undecided"),
        # B is 0.4 in all seeds; differences -0.01, 0, 0.01 have the interval +-4.303 * 0.01 / sqrt(3) = +-0.025.
        ({"sign": "=", "margin": 0.03}, [0.39, 0.40, 0.41], "reproduced"),
        ({"sign": "=", "margin": 0.02}, [0.39, 0.40, 0.41], "undecided"),
        ({"sign": "=", "margin": 0.03}, [0.59, 0.60, 0.61], "refuted"),
        ({"sign": "=", "margin": 0.03}, [0.19, 0.20, 0.21], "refuted"),
        ({"sign": "="}, [0.4, 0.4, 0.4], "reproduced"),
        ({}, [0.4, 0.4, 0.4], "undecided"),
        # A seed without the number decides nothing, unless the claim says for what it counts.
        ({}, [0.6, 0.7, None], "undecided"),
        ({"missing": 0.8}, [0.6, 0.7, None], "reproduced"),
        ({"missing": 0.0}, [0.6, 0.7, None], "undecided"),
        # So does a seed of which one run has not finished.
        ({}, [0.6, 0.7], "undecided"),
    ],
)
def test_the_side_on_which_the_interval_lies_is_the_verdict(tmp_path, given, ends, expected):
    assert verdict(claim(**A_AND_B, **given), runs_of(tmp_path, {"A": ends, "B": [0.4] * 3})).verdict == expected


def test_interval_p_and_size_are_those_of_the_differences_seed_by_seed(tmp_path):
    runs = runs_of(tmp_path, {"A": [0.7, 0.5, 0.65], "B": [0.4, 0.3, 0.38]})
    found = verdict(claim(**A_AND_B, size=0.25), runs[::-1])
    low, high = stats.t.interval(0.95, 2, 0.77 / 3, stats.sem([0.3, 0.2, 0.27]))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.holm == pytest.approx(stats.ttest_1samp([0.3, 0.2, 0.27], 0)[1])
    assert (found["first"], found.second) == (pytest.approx(1.85 / 3), pytest.approx(1.08 / 3))
    # The deviation of 0.4, 0.3, 0.38.
    assert found.second_sd == pytest.approx(np.std([0.4, 0.3, 0.38], ddof=1))
    assert found.inside and not verdict(claim(**A_AND_B, size=0.6), runs).inside
    assert verdict(claim(**A_AND_B), runs).inside is None


def test_an_order_is_evaluated_pair_by_pair_and_p_is_adjusted_over_all(tmp_path):
    runs = runs_of(tmp_path, {"A": [0.9, 0.8, 0.85], "B": [0.5, 0.45, 0.4], "C": [0.5, 0.4, 0.45]})
    found = assess([claim(order=[{"case": "A"}, {"case": "B"}, {"case": "C"}])], {"small": runs})
    assert found["compared"].tolist() == ["A > B", "B > C"]
    assert found["verdict"].tolist() == ["reproduced", "undecided"]
    # Holm: the smaller of two p-values counts twice.
    assert found["holm"].tolist() == pytest.approx([2 * found["p"][0], found["p"][1]])


@pytest.mark.parametrize(
    ("words", "slope"),
    [(["0.1", "0.2", "0.4"], 1.5), (["alpha=0.5", "alpha=1", "even"], 0.225)],
)
def test_a_trend_is_the_slope_of_each_seed_over_the_numbers_or_else_the_places(tmp_path, words, slope):
    # Linear in 0.1, 0.2, 0.4, with slopes 1 and 2; over places 0, 1, 2 the least-squares slope is half of last minus
    # first.
    runs = runs_of(tmp_path, dict(zip(words, ([0.1, 0.2], [0.2, 0.4], [0.4, 0.8]), strict=True)), "method.x")
    found = verdict(claim(trend="method.x"), runs)
    assert found["first"] == found["mean"] == pytest.approx(slope) and found.compared == "slope over method.x > 0"
    assert "second" not in found and found.first_runs.count(";") == 5


def test_two_sides_are_compared_by_their_trends(tmp_path):
    runs: Runs = [
        ({"case": case, **choices}, run)
        for case, ends in (("A", [0.5, 0.7]), ("B", [0.3, 0.2]))
        for choices, run in runs_of(tmp_path / case, {"1": [ends[0]] * 2, "2": [ends[1]] * 2}, "x")
    ]
    found = verdict(claim(**A_AND_B, trend="x"), runs)
    assert found["mean"] == pytest.approx(0.2 - -0.1) and found.compared == "slope over x of A > B"
    # A slope without one of its points is none.
    found = assess([claim(**A_AND_B, trend="x")], {"small": runs[:-1]})
    assert found["num_pairs"].tolist() == [1] and found["verdict"].tolist() == ["undecided"]
    # So does a slope over the values of a sweep of which only the first has finished.
    planned = [*runs[:2], *((choices, None) for choices, _ in runs[2:])]
    found = assess([claim(trend="x", where={"case": "A"})], {"small": planned})
    assert found["num_pairs"].tolist() == [0] and found["verdict"].tolist() == ["undecided"]


def test_a_trend_may_be_among_some_values_and_a_side_may_be_a_number(tmp_path):
    ends = {"false": [0.9, 0.9], "0.5": [0.2, 0.3], "1": [0.4, 0.6], "2": [0.8, 1.2]}
    runs = runs_of(tmp_path, ends, "method.tau")
    found = verdict(claim(trend="method.tau", among=["0.5", 1, "2"]), runs)
    assert found["mean"] == pytest.approx((0.4 + 0.6) / 2) and found.first_runs.count(";") == 5
    found = verdict(claim(better={"method": {"tau": 2}}, than=0.75), runs)
    assert found["mean"] == pytest.approx(0.25) and found.compared == "tau=2 > 0.75"
    assert found.second == 0.75 and found.second_runs == ""


def test_sides_may_have_numbers_of_their_own_and_a_difference_may_be_relative(tmp_path):
    # All runs begin at 0.2; A ends at 0.6, B at 0.5.
    runs: Runs = [
        ({"case": word, "seed": str(seed)}, run_of(tmp_path / f"{word}{seed}", {0: 0.2, 1: end}, seed=seed, label=word))
        for word, end in (("A", 0.6), ("B", 0.5))
        for seed in (0, 1)
    ]
    found = verdict(claim(**A_AND_B, than_value=f"{ACCURACY}:mean"), runs)
    assert found["mean"] == pytest.approx(0.6 - 0.35) and found.second == pytest.approx(0.35)
    assert found.value == f"{ACCURACY}:final against {ACCURACY}:mean"
    found = verdict(claim(**A_AND_B, relative=True), runs)
    assert found["mean"] == pytest.approx(0.1 / 0.5) and found.value == f"{ACCURACY}:final, relative"
    assert verdict(claim(better={"case": "A"}, than=0.5, relative=True), runs)["mean"] == pytest.approx(0.2)


def page(claims: Sequence[Claim], found: pd.DataFrame, runs: Runs) -> str:
    origin = {"command": "rayfl reproduce x", "commit": "abc"}
    return verdicts_markdown("A paper", claims, found, origin, [run for _, run in runs], 6)


def test_what_has_not_run_is_said():
    found = assess([claim(**A_AND_B)], {})
    assert found["verdict"].tolist() == ["not run"] and found["holm"].isna().tolist() == [True]
    text = page([claim(**A_AND_B)], found, [])
    assert "1 not run" in text and "0 of 6 runs" in text


def test_the_page_has_numbers_with_links_to_their_runs(tmp_path):
    runs = runs_of(tmp_path / "small", {"A": [0.7, 0.6], "B": [0.4, 0.4]})
    of = claim(**A_AND_B, size=0.1, setting="8x8")
    text = page([of], assess([of], {"small": runs}), runs)
    (row,) = [line for line in text.splitlines() if line.startswith("| one:")]
    cells = [cell.strip() for cell in row.split("|")][1:-1]
    a_side, b_side = cells[1].split(" / ")
    assert a_side == "65.00 \u00b1 7.07 % ([1](small/A-0/) [2](small/A-1/))"
    assert b_side == "40.00 \u00b1 0.00 % ([1](small/B-0/) [2](small/B-1/))"
    # Differences 0.3 and 0.2: 0.25 +- 12.706 * 0.05.
    assert cells[2:7] == ["+25.00 [-38.53, +88.53] %", "2", "**undecided**", "+10.00 %", "yes"]
    for words in ("`rayfl reproduce x`", "commit abc", "4 of 6 runs", "seeds 0, 1", "1 undecided", "A beats B", "8x8"):
        assert words in text
    # A relative difference is a share of the second side, whatever its unit.
    rounds = claim(**A_AND_B, value="rounds", relative=True)
    (row,) = [line for line in page([rounds], assess([rounds], {"small": runs}), runs).splitlines() if "| one:" in line]
    assert "2 \u00b1 0 (" in row and "| +0.00 [+0.00, +0.00] % |" in row


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"sweep": "smal", **A_AND_B}, ["one", "smal", "small"]),
        ({"better": {"case": "a"}, "than": {"case": "B"}}, ["one", "case='a'", "A"]),
        ({"better": {"kase": "A"}, "than": {"case": "B"}}, ["one", "kase", "case"]),
        ({**A_AND_B, "where": {"method.lr": 0.2}}, ["one", "method.lr='0.2'", "0.3"]),
        ({"better": {"method.lr": 0.1}, "than": {"method": {"lr": 0.3}}}, ["one", "case", "A, B"]),
        ({**A_AND_B, "where": {"method.lr": 0.1}, "trend": "tau"}, ["one", "tau"]),
        ({**A_AND_B, "trend": "method.lr", "among": [0.1, 0.4]}, ["one", "method.lr='0.4'", "0.3"]),
        ({"trend": "method.lr"}, ["one", "leaves 'case' open", "A, B"]),
        ({"better": {}, "than": 0.5}, ["one", "leaves 'case' open"]),
    ],
)
def test_a_claim_that_does_not_fit_its_sweep_is_refused(given, names):
    sweep = [{"case": case, "method.lr": lr, "seed": seed} for case in "AB" for lr in ("0.1", "0.3") for seed in "12"]
    refused(lambda: check(claim(**given), {"small": sweep}), names=names)
    check(claim(**A_AND_B, where={"method.lr": 0.3}), {"small": sweep})
    refused(lambda: check(claim(**A_AND_B), {"small": sweep[::2]}), names=["one", "small", "sweep.seed"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["one", "better", "than", "order", "trend"]),
        ({"better": {"case": "A"}}, ["one", "than"]),
        ({**A_AND_B, "order": [{"case": "A"}, {"case": "B"}]}, ["one", "order"]),
        ({**A_AND_B, "margin": 0.1}, ["one", "margin", "sign='='"]),
        ({**A_AND_B, "among": ["A", "B"]}, ["one", "among", "trend"]),
        ({"trend": "case", "among": ["A"]}, ["one", "among", "two values"]),
        ({"trend": "case", "relative": True}, ["one", "relative", "than"]),
        ({"better": {"case": "A"}, "than": 0.5, "than_value": "rounds"}, ["one", "than_value", "than"]),
        ({**A_AND_B, "sign": "!="}, ["sign", "!="]),
        ({**A_AND_B, "sizes": 0.1}, ["sizes", "size"]),
    ],
)
def test_a_claim_that_compares_nothing_is_refused(given, names):
    refused(lambda: claim(**given), names=names)


def test_a_number_that_no_run_has_is_refused_with_the_claim(tmp_path):
    runs = runs_of(tmp_path, {"A": [0.7, 0.6], "B": [0.4, 0.4]})
    with refused(names=["one", "pooled/acuracy", ACCURACY]):
        assess([claim(**A_AND_B, value="pooled/acuracy")], {"small": runs})
