"""Figures and tables of a page as files: their order, colours and numbers."""

import re

import pandas as pd

from rayfl.experiment.report_options import ReportOptions
from rayfl.report import wording
from rayfl.report.groups import group_runs
from rayfl.report.page import in_numbers, page, report, write_figures
from rayfl.run_directory.record import ORDER, read_run, run_directories
from tests.report.test_page import charts, record


def test_order_and_colours_are_those_of_the_sweep_or_of_the_options(tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name, last in (("a", 0.3), ("b", 0.5), ("c", 0.9)):
        record(sweep / name, [0.1, last], training={"lr": last})
    (sweep / ORDER).write_text('{"runs": ["c", "a"]}', encoding="utf-8")
    directories = run_directories(sweep)
    assert [directory.name for directory in directories] == ["c", "a", "b"]
    options = ReportOptions(order=("b",), colors={"a": "#ff00ff"})
    path = report(directories, tmp_path / "page.html", options)
    html = path.read_text(encoding="utf-8")
    chart = charts(html)["chart1-1"]
    # The curve of the metric that ranks the runs comes first.
    assert html.index('id="section1"') < html.index('id="runs"')
    assert chart["encoding"]["color"]["scale"]["domain"] == ["b", "c", "a"]
    assert len({*map(str, chart["layer"][-2]["encoding"]["strokeDash"]["scale"]["range"])}) == 3
    keys = dict(re.findall(r'border-color: ([^"]+)"></span>(\w+)<', html))
    assert keys == {"var(--c0)": "b", "var(--c1)": "c", "#ff00ff": "a"}
    # A damaged file of the order is none.
    (sweep / ORDER).write_text('{"runs": 3', encoding="utf-8")
    assert [directory.name for directory in run_directories(sweep)] == ["a", "b", "c"]


def test_what_never_changes_is_a_number_and_files_have_numbers(tmp_path):
    runs = [
        record(tmp_path / name, values, training={"lr": values[0]})
        for name, values in (("low", [0.1, 0.45]), ("high", [0.2, 0.9]))
    ]
    shown = page(group_runs([*map(read_run, runs)]), ReportOptions())
    figures = [figure for section in shown["sections"] for figure in section.figures]
    (up,) = [figure for figure in figures if figure.title == "Up"]
    assert up.chart == {} and up.caption.startswith("1 (MB per round), the same at all times.")
    paths = write_figures([*map(read_run, runs)], tmp_path / "files", ReportOptions())
    assert not any(path.stem.startswith("-") or path.stem.endswith("-") for path in paths)
    (table,) = [path for path in paths if path.stem.endswith("best-first") and path.suffix == ".csv"]
    frame = pd.read_csv(table)
    assert frame["Final, %"].tolist() == [90, 45] and frame["Up, MB"].tolist() == [2, 2]


def test_numbers_in_words_become_columns_of_numbers():
    words = {
        "Run": ["a", "b"],
        "Final": ["50.0 \u00b1 2.8 % (2)", wording.NONE],
        "Time": ["1,234.5 s", "2 min"],
        "Up": ["1,234.5 MB", "0.3 MB"],
    }
    numbers = in_numbers(pd.DataFrame(words))
    assert [*numbers] == ["Run", "Final, %", "Final, sd", "Final, n", "Time", "Up, MB"]
    assert numbers.iloc[0].tolist() == ["a", 50.0, 2.8, 2, "1,234.5 s", 1234.5]
    assert numbers["Final, %"].isna().tolist() == [False, True]
