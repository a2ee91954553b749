"""Runs side by side: what labels say, in which settings runs differ, and the axes of their charts."""

import re
from pathlib import Path

import numpy as np

from rayfl.report import page_tables, wording
from rayfl.report.charts import NUM_COLORS, Line, dots_chart, lines_chart
from rayfl.report.groups import group_runs
from rayfl.report.page import report
from rayfl.report.page_tables import differences
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.refusals import mentions


def recorded(directory: Path, uplink: dict, bits: int, *, seed: int = 1, accuracy: float = 0.5, **more: object) -> Path:
    """Two rounds of `bits` up and 8 Mbit down."""
    experiment = {"name": "same", "seed": seed, "uplink": uplink, **more}
    Description(experiment).write(create_run_directory(directory), {})
    with Recorder(directory) as recorder:
        for round in range(2):
            metrics = [MetricRow(None, "pooled/accuracy", accuracy)]
            recorder.round(RoundRow(round, 1, 1, bits, 8_000_000, 1.0, 1.0), [], metrics)
    return directory


X = np.arange(2.0)
DENSE = {"name": "dense", "dtype": "fp32"}
HALF = {"name": "dense", "dtype": "fp16"}


def test_a_run_without_a_dot_is_named(tmp_path):
    runs = [
        recorded(tmp_path / name, DENSE, bits, label=name, lr=bits)
        for name, bits in (("a", 8_000_000), ("b", 9_000_000), ("alone", 0))
    ]
    page = report(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    other = report(runs[:2], tmp_path / "two.html").read_text(encoding="utf-8")
    assert mentions(page, "no dot: alone") and "no dot" not in other


def test_labels_are_what_legends_say_and_seeds_and_actors_do_not_part_runs(tmp_path):
    runs = [
        recorded(tmp_path / f"{seed}", HALF, 8, seed=seed, label="half", runtime={"actors": seed, "threads": 1})
        for seed in (1, 2)
    ]
    other = recorded(tmp_path / "other", HALF, 8, label="half, 2 threads", runtime={"actors": 1, "threads": 2})
    found = group_runs([read_run(path) for path in (*runs, other)])
    assert [(group.label, group.seeds) for group in found] == [("half", [1, 2]), ("half, 2 threads", [1])]
    page = report([*runs, other], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Bytes sent up and final value" in page


def test_many_runs_get_a_row_each(tmp_path):
    runs = [recorded(tmp_path / f"{lr}", DENSE, 8, label=f"lr={lr}", lr=lr) for lr in range(5)]
    found = group_runs([read_run(path) for path in runs])
    few, many = differences(found[:4]), differences(found)
    assert few[:2] == (["Setting", "lr=0", "lr=1", "lr=2", "lr=3"], [["lr", "0", "1", "2", "3"]])
    assert many[:2] == (("Run", "lr"), [(f"lr={lr}", str(lr)) for lr in range(5)])


def test_no_two_of_28_runs_look_the_same():
    template = (Path(page_tables.__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    borders = re.findall(r'"(\w+)"', re.findall(r"set borders = (.*?) %}", template)[0])
    looks = {(style % NUM_COLORS, borders[style % 4]) for style in range(28)}
    assert len(looks) == 28 and "borders[style % 4]" in template


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
    charts = [dots_chart({"a": (1.0, 0.5, 0.0), "b": (x, 0.6, 0.0)}, "MB", "Accuracy", ["a", "b"]) for x in (9.0, 10.0)]
    assert [chart["encoding"]["x"]["scale"].get("type") for chart in charts] == [None, "log"]


def test_what_a_method_fixes_is_not_told_as_a_setting_that_runs_share(tmp_path):
    runs = [
        recorded(tmp_path / name, DENSE, 8, method={"name": name}, label=name, downlink=DENSE)
        for name in ("fedavg", "fedpse")
    ]
    table = differences(group_runs([read_run(path) for path in runs]))
    rows = {name: cells for name, *cells in table.rows}
    assert rows["uplink.name"] == rows["downlink.name"] and rows["uplink.name"][0] == "dense"
    assert mentions(rows["uplink.name"][1], "method")
    assert rows["uplink.dtype"] == ["fp32", wording.NONE]
