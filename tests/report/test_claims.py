"""Verdicts on claims: the rule, which runs are compared, and what is refused before anything runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rayfl.report.claims import Choices, Claim, check, check_distinct, read_pairs
from rayfl.report.verdicts import ClaimRows, decide, estimates, size_of, verdicts_markdown
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


def assess(claims: Sequence[Claim], runs: Mapping[str, Runs], **smallest: float) -> pd.DataFrame:
    rows = ClaimRows(claims, smallest)
    return decide(rows, estimates(rows, read_pairs(claims, runs)))


# Any: a row of a data frame.
def verdict(of: Claim, runs: Runs) -> Any:
    """The one row of the verdicts, with the numbers of its one moment."""
    check(of, {"small": [choices for choices, _ in runs]})
    (found,) = assess([of], {"small": runs}).to_dict("records")
    (moment,) = found["moments"]
    return SimpleNamespace(**{**moment, **found})


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
        # B is 0.4; differences -0.01, 0, 0.01: two one-sided tests pass from 2.920 * 0.01 / sqrt(3) = 0.0169 on.
        ({"sign": "=", "margin": 0.017}, [0.39, 0.40, 0.41], "reproduced"),
        ({"sign": "=", "margin": 0.0165}, [0.39, 0.40, 0.41], "undecided"),
        ({"sign": "=", "margin": 0.03}, [0.59, 0.60, 0.61], "refuted"),
        ({"sign": "=", "margin": 0.03}, [0.19, 0.20, 0.21], "refuted"),
        # Equal is decided before reproduced and refuted: a sure difference of 0.1 is no finding if 0.2 matters.
        ({"margin": 0.2}, [0.49, 0.50, 0.51], "equal"),
        ({"margin": 0.2, "sign": "<"}, [0.49, 0.50, 0.51], "equal"),
        ({"margin": 0.1}, [0.49, 0.50, 0.51], "reproduced"),
        ({"sign": "=", "margin": 0.0}, [0.4, 0.4, 0.4], "reproduced"),
        ({}, [0.4, 0.4, 0.4], "equal"),
        # The same difference in each seed follows from the settings.
        ({}, [0.5, 0.5, 0.5], "constant"),
        # A seed without the number decides nothing.
        ({}, [0.6, 0.7, None], "undecided"),
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
    assert (found.first, found.second) == (pytest.approx(1.85 / 3), pytest.approx(1.08 / 3))
    # The deviation of 0.4, 0.3, 0.38.
    assert found.second_sd == pytest.approx(np.std([0.4, 0.3, 0.38], ddof=1))
    sizes = {0.25: "inside", 0.6: "smaller", 0.01: "larger", -0.6: "smaller", np.nan: "\u2013"}
    assert {size: size_of(size, vars(found)) for size in sizes} == sizes


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
    assert found.first == found.mean == pytest.approx(slope) and found.compared == "slope over method.x > 0"
    assert found.second_runs == "" and found.first_runs.count(";") == 5


def test_two_sides_are_compared_by_their_trends(tmp_path):
    runs: Runs = [
        ({"case": case, **choices}, run)
        for case, ends in (("A", [0.5, 0.7]), ("B", [0.3, 0.2]))
        for choices, run in runs_of(tmp_path / case, {"1": [ends[0]] * 2, "2": [ends[1]] * 2}, "x")
    ]
    found = verdict(claim(**A_AND_B, trend="x"), runs)
    assert found.mean == pytest.approx(0.2 - -0.1) and found.compared == "slope over x of A > B"
    # A slope without one of its points is none.
    found = assess([claim(**A_AND_B, trend="x")], {"small": runs[:-1]})
    assert [moment["num_pairs"] for moment in found["moments"][0]] == [1]
    assert found["verdict"].tolist() == ["undecided"]
    # So does a slope over the values of a sweep of which only the first has finished.
    planned = [*runs[:2], *((choices, None) for choices, _ in runs[2:])]
    found = assess([claim(trend="x", where={"case": "A"})], {"small": planned})
    assert [moment["num_pairs"] for moment in found["moments"][0]] == [0]
    assert found["verdict"].tolist() == ["undecided"]


def test_a_trend_may_be_among_some_values_and_a_side_may_be_a_number(tmp_path):
    ends = {"false": [0.9, 0.9], "0.5": [0.2, 0.3], "1": [0.4, 0.6], "2": [0.8, 1.2]}
    runs = runs_of(tmp_path, ends, "method.tau")
    found = verdict(claim(trend="method.tau", among=["0.5", 1, "2"]), runs)
    assert found.mean == pytest.approx((0.4 + 0.6) / 2) and found.first_runs.count(";") == 5
    found = verdict(claim(better={"method": {"tau": 2}}, than=0.75), runs)
    assert found.mean == pytest.approx(0.25) and found.compared == "tau=2 > 0.75"
    assert found.second == 0.75 and found.second_runs == ""


def test_sides_may_have_numbers_of_their_own_and_a_difference_may_be_relative(tmp_path):
    # All runs begin at 0.2; A ends at 0.6, B at 0.5.
    runs: Runs = [
        ({"case": word, "seed": str(seed)}, run_of(tmp_path / f"{word}{seed}", {0: 0.2, 1: end}, seed=seed, label=word))
        for word, end in (("A", 0.6), ("B", 0.5))
        for seed in (0, 1)
    ]
    found = verdict(claim(**A_AND_B, than_value=f"{ACCURACY}:mean"), runs)
    assert found.mean == pytest.approx(0.6 - 0.35) and found.second == pytest.approx(0.35)
    found = verdict(claim(**A_AND_B, relative=True), runs)
    assert found.mean == pytest.approx(0.1 / 0.5)
    assert verdict(claim(better={"case": "A"}, than=0.5, relative=True), runs).mean == pytest.approx(0.2)


def page(claims: Sequence[Claim], runs: Runs) -> str:
    return verdicts_markdown(
        "A paper", ClaimRows(claims, {}), assess(claims, {"small": runs}), ["Hash 1."], [run for _, run in runs]
    )


def row_of(text: str, claim_id: str) -> list[list[str]]:
    """The cells of each row of a claim."""
    return [
        [cell.strip() for cell in line.split("|")][1:-1]
        for line in text.splitlines()
        if line.startswith(f"| {claim_id}:")
    ]


def test_what_has_not_run_is_said():
    found = assess([claim(**A_AND_B)], {})
    assert found["verdict"].tolist() == ["not run"] and found["holm"].isna().tolist() == [True]
    assert "1 row: 1 not run" in page([claim(**A_AND_B)], [])


def test_the_page_begins_with_its_table_and_links_to_the_runs(tmp_path):
    runs = runs_of(tmp_path / "small", {"A": [0.7, 0.6], "B": [0.4, 0.4]})
    ours = claim(**A_AND_B, id="mine", source="ours", than_value="rounds")
    text = page([claim(**A_AND_B, size=0.1, setting="8x8", places=["Figure 9."]), ours], runs)
    assert text.splitlines()[2] == "1 row: 1 undecided." and text.splitlines()[4].startswith("| Claim |")
    short, sides = row_of(text, "one")
    # Differences 0.3 and 0.2: 0.25 +- 12.706 * 0.05.
    assert short[1:3] == ["+25.00 [-38.53, +88.53] %", "2"] and short[4:] == ["undecided", "+10.00 %", "inside"]
    a_side, b_side = sides[2].split(" / ")
    assert a_side == "65.00 \u00b1 7.07 % ([1](small/A-0/) [2](small/A-1/))"
    assert b_side == "40.00 \u00b1 0.00 % ([1](small/B-0/) [2](small/B-1/))"
    assert text.index("not counted") < text.index("| mine:")
    for words in ("Hash 1.", "Seeds 0, 1", "A beats B Figure 9.", "8x8"):
        assert words in text
    # A relative difference is a share of the second side, whatever its unit.
    rounds = claim(**A_AND_B, value="rounds", relative=True, source="ours")
    assert row_of(page([rounds], runs), "one")[0][1] == "+0.00 [+0.00, +0.00] %"


def test_two_moments_must_agree_and_enter_with_the_larger_p(tmp_path):
    # The mean over both evaluations has half of the difference at the end, and C much noise in its first.
    runs: Runs = [
        (
            {"case": word, "seed": str(seed)},
            run_of(tmp_path / f"{word}-{seed}", {0: start, 1: end}, rounds=2, seed=seed, label=word),
        )
        for word, starts, ends in (
            ("A", [0.21, 0.2, 0.22], [0.6, 0.7, 0.65]),
            ("B", [0.2] * 3, [0.4] * 3),
            ("C", [0.9, 0.1, 0.2], [0.6, 0.7, 0.65]),
        )
        for seed, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    moments = {"value": [f"{ACCURACY}:final", f"{ACCURACY}:mean"]}
    both = claim(id="both", better={"case": "A"}, than={"case": "B"}, **moments)
    one = claim(id="one of two", better={"case": "C"}, than={"case": "B"}, **moments)
    found = assess([both, one], {"small": runs}).set_index("claim")
    assert found["verdict"].to_dict() == {"both": "reproduced", "one of two": "depends on the moment"}
    assert found["p"]["both"] == max(moment["p"] for moment in found["moments"]["both"])


def test_holm_decides_over_the_papers_rows_run_or_not(tmp_path):
    # p of 0.2, 0.21, 0.25 is 0.0051: enough for eight more tests, not for ten.
    runs = runs_of(tmp_path, {"A": [0.6, 0.61, 0.65], "B": [0.4] * 3})
    for more, expected in ((8, "reproduced"), (10, "undecided")):
        others = [claim(id=f"other {number}", **A_AND_B, sweep="not run") for number in range(more)]
        ours = claim(id="ours", source="ours", **A_AND_B)
        verdicts = assess([claim(**A_AND_B), *others, ours], {"small": runs}).to_dict("records")
        assert (verdicts[0]["claim"], verdicts[0]["verdict"]) == ("one", expected)
        # Ours takes no part.
        assert verdicts[-1]["verdict"] == "reproduced" and np.isnan(verdicts[-1]["holm"])


def test_runs_that_never_arrive_are_censored_and_ranked(tmp_path):
    reached = {0: 0.0, 1: 0.9}
    runs: Runs = [
        ({"case": word, "seed": str(seed)}, run_of(tmp_path / f"{word}{seed}", ends, rounds=2, seed=seed, label=word))
        for seed in range(8)
        for word, ends in (("A", reached), ("B", {0: 0.0, 1: 0.1}))
    ]
    target = claim(**A_AND_B, value=f"rounds@{ACCURACY}=0.5", sign="<", horizon=10)
    found = verdict(target, runs)
    # Eight signs alike: p is 2 / 2 ** 8, and no interval is made of the horizon. A arrives in its second round.
    assert found.p == 2 / 2**8 and found.verdict == "reproduced" and np.isnan(found.low)
    assert found.mean == 2 - 10
    with refused(names=["one", "horizon"]):
        claim(**A_AND_B, value=f"rounds@{ACCURACY}=0.5")


def test_a_method_that_has_not_converged_is_not_refuted(tmp_path):
    runs = runs_of(tmp_path, {"A": [0.1, 0.2, 0.1], "B": [0.4] * 3})
    assert verdict(claim(**A_AND_B, converged=f"rounds@{ACCURACY}=0.05"), runs).verdict == "refuted"
    assert verdict(claim(**A_AND_B, converged=f"rounds@{ACCURACY}=0.15"), runs).verdict == "not converged"


def test_the_hash_is_of_the_papers_claims_and_their_smallest_effects():
    mine = claim(**A_AND_B, source="ours")
    rows = ClaimRows([claim(**A_AND_B), mine], {"%": 0.01})
    assert rows.digest == ClaimRows([claim(**A_AND_B)], {"%": 0.01}).digest
    assert (
        len({rows.digest, ClaimRows(rows.claims, {"%": 0.02}).digest, ClaimRows([claim(**A_AND_B, size=1)], {}).digest})
        == 3
    )


def test_two_claims_about_one_pair_of_runs_are_refused():
    sweeps = {"small": [({"case": case, "seed": seed}, f"{case}{seed}") for case in "ABC" for seed in "12"]}
    again = {"small again": [({"case": case, "seed": seed}, f"{case.upper()}{seed}") for case in "ab" for seed in "12"]}
    twice = [claim(**A_AND_B), claim(id="two", sweep="small again", better={"case": "b"}, than={"case": "a"})]
    refused(lambda: check_distinct(twice, sweeps | again), names=["one", "two", "places"])
    check_distinct([twice[0], claim(id="two", value="rounds@0.5", horizon=9, **A_AND_B)], sweeps)
    check_distinct([twice[0], claim(id="two", order=[{"case": "A"}, {"case": "C"}])], sweeps)
    alike = {"small": [(choices, name.replace("B", "A")) for choices, name in sweeps["small"]]}
    refused(lambda: check_distinct([claim(**A_AND_B)], alike), names=["one", "cannot fail"])


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
        ({**A_AND_B, "sign": "="}, ["one", "margin", "sign='='"]),
        ({**A_AND_B, "value": "megabytes"}, ["one", "megabytes", "settings", "ours"]),
        ({**A_AND_B, "value": "rounds@0.8"}, ["one", "horizon"]),
        ({**A_AND_B, "horizon": 9}, ["one", "horizon", "@"]),
        (
            {**A_AND_B, "value": "own/a", "than_value": "own_after_training/a"},
            ["one", "own_after_training/a", "moment"],
        ),
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
