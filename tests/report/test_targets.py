"""Rounds, megabytes and seconds to a target accuracy, and smoothed finals."""

import math

import pytest

from rayfl.metrics.facts import ACCURACY as FACTS
from rayfl.report.groups import Group, Score, group_runs, in_words, over, smoothed
from rayfl.report.numbers import costs_to_target, targets
from rayfl.report.page_tables import Column, sortable
from tests.hand_written import ACCURACY, group_of, run_of
from tests.refusals import mentions


def test_the_smoothed_final_is_the_mean_of_the_last_evaluations_of_each_seed(tmp_path):
    one = run_of(tmp_path / "1", {0: 0.1, 2: 0.4, 4: 0.5, 6: 0.9}, seed=1)
    two = run_of(tmp_path / "2", {0: 0.2, 2: 0.4}, seed=2)
    assert smoothed(group_of(one), ACCURACY, 3).mean == pytest.approx((0.4 + 0.5 + 0.9) / 3)
    assert smoothed(group_of(two), ACCURACY, 3).mean == pytest.approx(0.3)
    assert smoothed(group_of(one), "own/accuracy", 3).count == 0
    group = group_of(one, two)
    # 0.6 and 0.3: their deviation is 0.3 / sqrt(2).
    found = smoothed(group, ACCURACY, 3)
    assert (found.mean, found.deviation, found.count) == (pytest.approx(0.45), pytest.approx(0.3 / math.sqrt(2)), 2)
    assert in_words(found, FACTS) == "45.0 \u00b1 21.2 % (2)"
    assert smoothed(group, ACCURACY, 1).mean == pytest.approx(0.65)


def test_a_score_leaves_out_what_is_no_number():
    assert over([0.5, math.nan, 0.7]).count == 2
    assert over([math.nan]).count == 0
    assert over([math.nan]).words() == "\u2013"
    assert Score(0.5, 0.0, 1).words() == "0.5 (1)"
    assert Score(0.5, 0.0, 1).words(counted=False) == "0.5"
    assert Score(1234.5, 0.25, 3).words(decimals=2, unit=" MB") == "1,234.50 \u00b1 0.25 MB (3)"


def test_the_price_is_what_was_spent_when_an_evaluation_first_showed_the_target(tmp_path):
    # Evaluated in other rounds, of other lengths: seed 1 passes 0.6 in round 3 (4 rounds), seed 2 in round 1 (2 rounds)
    # though it falls again, seed 3 never.
    group = group_of(
        run_of(tmp_path / "1", {1: 0.1, 3: 0.7, 5: 0.8}, seed=1),
        run_of(tmp_path / "2", {0: 0.3, 1: 0.6, 2: 0.2}, seed=2),
        run_of(tmp_path / "3", {0: 0.3, 1: 0.59}, rounds=9, seed=3),
    )
    found = {name: score for name, (score,) in costs_to_target([group], ACCURACY, 0.6).items()}
    assert found["rounds"].count == 2
    # 4 and 2 rounds of 1 MB up, 4 MB both ways, 2 s; of a and b the deviation is |a - b| / sqrt(2).
    spread = 2 / math.sqrt(2)
    assert (found["rounds"].mean, found["rounds"].deviation) == (3, pytest.approx(spread))
    assert (found["uplink_megabytes"].mean, found["uplink_megabytes"].deviation) == (3, pytest.approx(spread))
    assert (found["megabytes"].mean, found["megabytes"].deviation) == (12, pytest.approx(4 * spread))
    assert (found["simulated_s"].mean, found["simulated_s"].deviation) == (6, pytest.approx(2 * spread))
    nobody = costs_to_target([group], ACCURACY, 0.81)
    assert (nobody["rounds"][0].count, nobody["megabytes"][0].count) == (0, 0)
    assert "not reached (best 80.0 %)" in str(targets([group], ACCURACY, 0.81, 3)["rows"])
    assert "'\u2013'" in str(targets([group], "own/accuracy", 0.5, 3)["rows"])


def test_without_any_value_nobody_reaches_the_target(tmp_path):
    table = targets(group_runs([run_of(tmp_path / "1", {}, rounds=2)]), ACCURACY, 0.5, 3)
    assert table["rows"][0][1][0] == "\u2013"


def test_the_table_is_sorted_by_megabytes_and_says_who_did_not_get_there(tmp_path):
    runs = [
        # 8 MB up and 24 MB down in both seeds.
        run_of(tmp_path / "dear-1", {0: 0.9}, megabytes=8, seed=1, label="dear", lr=1),
        run_of(tmp_path / "dear-2", {0: 0.9}, megabytes=8, seed=2, label="dear", lr=1),
        run_of(tmp_path / "cheap-1", {0: 0.8, 1: 0.82}, seed=1, label="cheap", lr=2),
        run_of(tmp_path / "cheap-2", {0: 0.5, 1: 0.86}, seed=2, label="cheap", lr=2),
        # The cheapest, but with one seed of two.
        run_of(tmp_path / "lucky-1", {0: 0.8}, seed=1, label="lucky", lr=3),
        run_of(tmp_path / "lucky-2", {0: 0.79}, seed=2, label="lucky", lr=3),
        run_of(tmp_path / "near-1", {0: 0.7}, seed=1, label="near", lr=4),
        run_of(tmp_path / "near-2", {0: 0.78}, seed=2, label="near", lr=4),
        run_of(tmp_path / "far", {0: 0.2}, label="far", lr=5),
        run_of(tmp_path / "other", {0: 0.99}, name="own/accuracy", label="other", lr=6),
    ]
    table = targets(group_runs(runs), ACCURACY, 0.8, 1)
    heads, rows = table["heads"], table["rows"]
    assert [head for head, _, _ in heads] == [
        "Reached", "Rounds", "Up", "Up and down", "Simulated time", "Final, smoothed"
    ]  # fmt: skip
    assert [head for head, _, chosen in heads if chosen] == ["Up and down"]
    nothing = ["\u2013"] * 4
    cells = {run[0]: cells for run, cells, _ in rows}
    assert list(cells) == ["cheap", "dear", "lucky", "near", "far", "other"]
    assert cells["cheap"] == [
        "2 of 2 seeds",
        "1.5 \u00b1 0.7 (2)",
        "1.50 \u00b1 0.71 MB (2)",
        "6.00 \u00b1 2.83 MB (2)",
        "3.0 \u00b1 1.4 s (2)",
        "84.0 \u00b1 2.8 % (2)",
    ]
    assert cells["dear"][:4] == ["2 of 2 seeds", "1 \u00b1 0 (2)", "8.00 \u00b1 0.00 MB (2)", "11.0 \u00b1 0.0 MB (2)"]
    assert cells["lucky"][:4] == ["1 of 2 seeds", "1 (1)", "1.00 MB (1)", "4.00 MB (1)"]
    for label, best, last in (("near", "78.0 %", "74.0 \u00b1 5.7 % (2)"), ("far", "20.0 %", "20.0 % (1)")):
        assert mentions(cells[label][0], best) and cells[label][1:] == [*nothing, last]
    assert cells["other"] == ["\u2013", *nothing, "\u2013"]
    # By rounds dear (1) goes before cheap (1.5), by the final too; lucky stays behind all whose seeds all got there.
    places = {run[0]: places for run, _, places in rows}
    assert [places[label][1] for label in cells] == [1, 0, 2, 3, 4, 5]
    assert [places[label][3] for label in cells] == [0, 1, 2, 3, 4, 5]
    assert [places[label][5] for label in cells] == [1, 0, 2, 3, 4, 5]


def test_single_seeds_are_not_counted(tmp_path):
    runs = [run_of(tmp_path / str(lr), {0: 0.9}, lr=lr, label=str(lr)) for lr in (1, 2)]
    table = targets(group_runs(runs), ACCURACY, 0.85, 3)
    assert table["rows"][0][1] == ["yes", "1", "1.00 MB", "4.00 MB", "2.0 s", "90.0 %"]


def test_a_sortable_table_knows_where_each_column_puts_a_row():
    columns = [
        Column("number", ["a", "b", "c"], [(2.0,), (math.nan,), (1.0,)]),
        Column("pair", ["a", "b", "c"], [(1.0, 5.0), (0.0, 9.0), (1.0, 4.0)]),
        Column("words", ["a", "b", "c"]),
        Column("same", ["a", "b", "c"], [(0.0,), (0.0,), (0.0,)]),
    ]
    table = sortable([Group(label, ()) for label in "abc"], columns, "pair")
    assert table["heads"] == [
        ("number", True, False), ("pair", True, True), ("words", False, False), ("same", True, False)
    ]  # fmt: skip
    # In the order of "pair": b, c, a, each with the colour of its place among the groups.
    assert [(run[0], places) for run, _, places in table["rows"]] == [
        ("b", [2, 0, 1, 1]), ("c", [0, 1, 2, 2]), ("a", [1, 2, 0, 0])
    ]  # fmt: skip
    assert [style for (_, style), _, _ in table["rows"]] == [1, 2, 0]
