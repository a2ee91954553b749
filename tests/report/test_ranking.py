"""Runs side by side: who is held against which dense run, what labels say, and the axes of their charts."""

from pathlib import Path

import numpy as np
import pytest

from rayfl.report import wording
from rayfl.report.charts import Dot, Line, dots_chart, lines_chart
from rayfl.report.colors import NUM_COLORS, key
from rayfl.report.page import report
from rayfl.report.ranking import differences, ranking
from rayfl.report.series import Group, groups
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import describe_run
from rayfl.run_directory.record import Recorder, read_run
from rayfl.run_directory.run_folder import create_run_directory


def recorded(directory: Path, uplink: dict, bits: int, *, seed: int = 1, accuracy: float = 0.5, **more: object) -> Path:
    """Two rounds of `bits` up and 8 Mbit down."""
    experiment = {"name": "same", "seed": seed, "uplink": uplink, **more}
    describe_run(create_run_directory(directory), experiment, {}, "")
    with Recorder(directory) as recorder:
        for round in range(2):
            metrics = [MetricRow(None, "pooled/accuracy", accuracy)]
            recorder.round(RoundRow(round, 1, 1, bits, 8_000_000, 1.0, 1.0), [], metrics)
    return directory


X = np.arange(2.0)
DENSE = {"name": "dense", "dtype": "fp32"}
HALF = {"name": "dense", "dtype": "fp16"}


def against_dense(found: list[Group]) -> dict[str, str]:
    table = ranking(found, ["pooled/accuracy"])
    heads, rows = table["heads"], table["rows"]
    assert isinstance(heads, list) and isinstance(rows, list)
    column = [head for head, _, _ in heads].index("Up, against dense")
    return {row.label: cells[column] for row, cells, _ in rows}


def test_each_run_is_held_against_the_dense_run_of_its_own_settings(tmp_path):
    # Of learning rate 1 the dense run sends 64 Mbit a round, of learning rate 2 half as much, of 3 there is none.
    runs = [
        recorded(tmp_path / "a", DENSE, 64_000_000, lr=1, label="dense 1"),
        recorded(tmp_path / "b", HALF, 32_000_000, lr=1, label="half 1"),
        recorded(tmp_path / "c", DENSE, 32_000_000, lr=2, label="dense 2"),
        recorded(tmp_path / "d", {"name": "topk"}, 250_000, lr=2, label="topk 2"),
        recorded(tmp_path / "e", {"name": "topk"}, 250_000, lr=3, label="topk 3"),
    ]
    assert against_dense(groups([read_run(path) for path in runs])) == {
        "dense 1": "as much",
        "half 1": "2.00\u00d7 less",
        "dense 2": "as much",
        "topk 2": "128\u00d7 less",
        "topk 3": wording.NONE,
    }


def test_a_run_without_a_dot_is_named(tmp_path):
    runs = [
        recorded(tmp_path / name, DENSE, bits, label=name, lr=bits)
        for name, bits in (("a", 8_000_000), ("b", 9_000_000), ("alone", 0))
    ]
    page = report(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Runs that sent nothing up have no dot: alone." in page
    assert "have no dot" not in report(runs[:2], tmp_path / "two.html").read_text(encoding="utf-8")


def test_without_a_dense_run_nothing_is_held_against_it(tmp_path):
    found = groups([read_run(recorded(tmp_path / "b", HALF, 32, label="half"))])
    assert "Up, against dense" not in str(ranking(found, ["pooled/accuracy"])["heads"])


def test_labels_are_what_legends_say_and_seeds_and_actors_do_not_part_runs(tmp_path):
    runs = [
        recorded(tmp_path / f"{seed}", HALF, 8, seed=seed, label="half", runtime={"actors": seed, "threads": 1})
        for seed in (1, 2)
    ]
    other = recorded(tmp_path / "other", HALF, 8, label="half, 2 threads", runtime={"actors": 1, "threads": 2})
    found = groups([read_run(path) for path in (*runs, other)])
    assert [(group.label, group.seeds) for group in found] == [("half", [1, 2]), ("half, 2 threads", [1])]
    page = report([*runs, other], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Bytes up and final accuracy" in page


def test_many_runs_get_a_row_each(tmp_path):
    runs = [recorded(tmp_path / f"{lr}", DENSE, 8, label=f"lr={lr}", lr=lr) for lr in range(5)]
    found = groups([read_run(path) for path in runs])
    few, many = differences(found[:4]), differences(found)
    assert few == {"head": ["Setting", "lr=0", "lr=1", "lr=2", "lr=3"], "rows": [("lr", ["0", "1", "2", "3"])]}
    assert many == {"head": ["Run", "lr"], "rows": [(key(f"lr={lr}", lr), [str(lr)]) for lr in range(5)]}


def test_no_two_of_28_runs_look_the_same():
    assert len({(key("", style).color, key("", style).dash) for style in range(4 * NUM_COLORS)}) == 28


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.0, "as much"),
        (31.44, "31.4\u00d7 less"),
        (2.0, "2.00\u00d7 less"),
        (0.5, "2.00\u00d7 more"),
        (99.6, "100\u00d7 less"),
    ],
)
def test_times_less(ratio, words):
    assert wording.times_less(ratio) == words


def test_lines_that_begin_at_zero_and_lie_far_apart_are_drawn_on_a_logarithmic_axis():
    def is_log(*tops: float) -> bool:
        lines = [Line(str(n), {"Round": X}, np.full(2, top)) for n, top in enumerate(tops)]
        chart = lines_chart(lines, "MB", [line.label for line in lines], from_zero=True)
        return next(param["value"] for param in chart["params"] if param["name"] == "log_y")

    # A line that stays at zero cannot be drawn on such an axis, and does not prevent it.
    assert is_log(1.0, 0.1) and not is_log(1.0, 0.11) and not is_log(1.0, 0.0) and is_log(1.0, 0.1, 0.0)


def test_lines_can_be_drawn_against_what_was_spent_and_keep_their_colour():
    lines = [Line("b", {"Round": X, "MB": X, "s": 0 * X}, X), Line("c", {"Round": X, "MB": 0 * X, "s": 0 * X}, X)]
    chart = lines_chart(lines, 'a "title" \\', ["a", "b", "c"])
    # Nothing took simulated time.
    assert chart["params"][0]["bind"]["options"] == ["Round", "MB"]
    color = chart["encoding"]["color"]
    assert color["scale"]["domain"] == ["a", "b", "c"] and color["legend"]["values"] == ["b", "c"]
    # Vega-Lite writes titles into expressions.
    assert '"' not in (title := chart["layer"][0]["encoding"]["y"]["title"]) and "\\" not in title


def test_dots_far_apart_are_drawn_on_a_logarithmic_axis():
    charts = [dots_chart([Dot("a", 1.0, 0.5), Dot("b", x, 0.6)], "MB", "Accuracy", ["a", "b"]) for x in (9.0, 10.0)]
    assert [chart["encoding"]["x"]["scale"].get("type") for chart in charts] == [None, "log"]


def test_what_a_method_fixes_is_not_told_as_a_setting_that_runs_share(tmp_path):
    runs = [
        recorded(tmp_path / name, DENSE, 8, method={"name": name}, label=name, downlink=DENSE)
        for name in ("fedavg", "fedpse")
    ]
    table = differences(groups([read_run(path) for path in runs]))["rows"]
    assert isinstance(table, list)
    rows = dict(table)
    assert rows["uplink.name"] == rows["downlink.name"] == ["dense", "fixed by the method"]
    assert rows["uplink.dtype"] == ["fp32", wording.NONE]
