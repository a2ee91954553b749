"""Numbers of runs by name, as columns."""

import math

import pytest

from rayfl.experiment.report_options import ReportOptions
from rayfl.report.groups import group_runs
from rayfl.report.numbers import further_columns, number
from rayfl.report.page import report
from rayfl.report.results import SweepResults, load
from rayfl.report.summary import comparison, require
from rayfl.run_directory.record import Run
from tests.hand_written import ACCURACY, heading, run_of
from tests.refusals import mentions, refused


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    """Two seeds; each round sends 1 MB up and 3 MB down in 2 simulated seconds."""
    return [
        run_of(tmp_path / "1", {0: 0.25, 1: 0.75, 2: 0.5}, seed=1),
        run_of(tmp_path / "2", {0: 0.125, 1: 0.25, 2: 0.375, 3: 0.5}, seed=2),
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (ACCURACY, [(0.75 + 0.5) / 2, (0.375 + 0.5) / 2]),
        (f"{ACCURACY}:final", [0.5, 0.5]),
        (f"{ACCURACY}:best", [0.75, 0.5]),
        (f"{ACCURACY}:mean", [0.5, 0.3125]),
        (f"{ACCURACY}:sum", [1.5, 1.25]),
        (f"{ACCURACY}:oscillation", [(0.5 + 0.25 - 0.25) / 2, 0.0]),
        ("rounds", [3, 4]),
        ("megabytes", [12, 16]),
        ("uplink_megabytes", [3, 4]),
        ("downlink_megabytes", [9, 12]),
        ("simulated_s", [6, 8]),
        ("wall_s", [3, 4]),
        ("rounds@0.5", [2, 4]),
        ("megabytes@0.5", [8, 16]),
        ("uplink_megabytes@.5", [2, 4]),
        (f"simulated_s@{ACCURACY}=5e-1", [4, 8]),
        ("rounds@0.75", [2, None]),
    ],
)
def test_a_number_is_read_by_its_name(runs, name, values):
    found = number(name, group_runs(runs), ACCURACY, last=2)
    expected = [math.nan if one is None else one for one in values]
    assert [found.read(run) for run in runs] == pytest.approx(expected, nan_ok=True)


def test_costs_per_round_are_means_over_all_rounds_and_their_unit_is_said(tmp_path):
    run = run_of(tmp_path / "1", {0: 1.0, 1: 2.0, 2: 6.0}, name="comm/busiest_megabytes")
    comm = number("comm/busiest_megabytes", group_runs([run]), None, last=1)
    assert (comm.read(run), comm.facts.unit) == (3.0, "MB per round")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("pooled/acuracy", ["pooled/acuracy", ACCURACY]),
        (f"{ACCURACY}:worst", [f"{ACCURACY}:worst", "best", "final"]),
        ("rounds@nowhere", ["rounds@nowhere"]),
        ("rounds@own/accuracy=0.8", ["own/accuracy", ACCURACY]),
        ("bytes", ["bytes", "megabytes"]),
    ],
)
def test_an_unknown_number_is_refused_with_those_that_are_there(runs, name, names):
    with refused(names=names):
        require(runs, ReportOptions(values=("megabytes", name)))


def test_the_page_the_comparison_and_python_show_the_same_columns(tmp_path, runs):
    options = ReportOptions(values=("rounds@0.5", "downlink_megabytes"), target=(0.5, 0.75))
    table = comparison(runs, options)[0]
    assert mentions(table.title, ACCURACY)
    (row,) = table.rows
    shown = dict(zip(table.heads, row, strict=True))
    assert shown["Rounds to 75 %"] == "2 (1)"
    assert shown["Sent down"] == "10.50 \u00b1 2.12 MB (2)"
    html = report([run.directory for run in runs], tmp_path / "page.html", options).read_text()
    assert "3.000 \u00b1 1.414 (2)" in html and "10.50 \u00b1 2.12 MB (2)" in html
    assert mentions(heading(html, "target"), "50 %") and mentions(heading(html, "target2"), "75 %")
    found = load(tmp_path)
    assert isinstance(found, SweepResults)
    frame = found.numbers("rounds@0.5", "downlink_megabytes")
    assert frame["rounds@0.5"].tolist() == [2, 4] and frame["downlink_megabytes"].tolist() == [9, 12]
    assert frame["seed"].tolist() == [1, 2]
    # A page of runs that have not recorded a number yet has an empty column.
    (column,) = further_columns(group_runs(runs), ACCURACY, ReportOptions(values=("own/accuracy",)))
    assert column.cells == ["\u2013"]
