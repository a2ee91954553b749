"""Tables by swept settings: their numbers, differences and marks, and how they are written."""

import io
import math
import subprocess
from dataclasses import replace
from html import unescape

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rayfl.experiment.report_options import ReportOptions, TableOptions
from rayfl.report import wording
from rayfl.report.figures import sections
from rayfl.report.groups import group_runs
from rayfl.report.numbers import COSTS
from rayfl.report.page import report, write_figures
from rayfl.report.pivot import Pivot, pivots
from rayfl.report.results import RunResults, SweepResults
from rayfl.report.statistics import holm
from rayfl.run_directory.record import Run
from tests.hand_written import ACCURACY, heading, run_of
from tests.jobs.commands import rayfl
from tests.refusals import mentions, refused

# Accuracy of three seeds by method and mu. "plain" lies 0.1 to 0.12 above "prox" at mu = 0.1 and 10, and at 2 both
# differ by less than seeds do.
VALUES = {
    ("plain", 0.1): [0.50, 0.60, 0.70],
    ("plain", 2.0): [0.50, 0.60, 0.70],
    ("plain", 10.0): [0.50, 0.60, 0.70],
    ("prox", 0.1): [0.40, 0.49, 0.58],
    ("prox", 2.0): [0.45, 0.65, 0.69],
    ("prox", 10.0): [0.40, 0.49, 0.58],
}
GRID = {"rows": "case", "columns": "method.mu"}


def swept_runs(folder, values, **settings) -> list[Run]:
    """A run for each value, as a sweep over cases, mu and seeds records it; `settings`: of all runs."""
    return [
        run_of(
            folder / f"{case} {mu} {seed}",
            {0: value},
            seed=seed,
            label=f"{case}, mu={mu}",
            method={"name": case, "mu": mu},
            swept={"case": case, "method.mu": str(mu)},
            **settings,
        )
        for (case, mu), seeds in values.items()
        for seed, value in enumerate(seeds)
    ]


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    return swept_runs(tmp_path, VALUES)


def table_of(runs, **options) -> Pivot:
    (found,) = pivots(group_runs(runs), ReportOptions(tables=(TableOptions(**{**GRID, **options}),)))
    return found


def written(table: Pivot) -> tuple[list[str], list[list[str]]]:
    """Headings and rows as text."""
    return [*table.flat()], table.flat().to_numpy().tolist()


def cell(table: Pivot, row: str, column: str, number: str = ACCURACY) -> pd.Series:
    frame = table.frame
    (found,) = frame[(frame["row"] == row) & (frame["column"] == column) & (frame["number"] == number)].index
    return frame.loc[found]


def says(text: str, *words: str) -> bool:
    return all(mentions(text, word) for word in words)


def test_cells_have_means_and_deviations_over_seeds_and_numbers_are_sorted_by_size(runs):
    table = table_of(runs[::-1])
    heads, rows = written(table)
    assert heads == ["case", "mu = 0.1", "mu = 2.0", "mu = 10.0"]
    assert rows[0][:3] == ["prox", "49.00 ± 9.00 (worst)", "59.67 ± 12.86"] and rows[1][0] == "plain"
    for (row, column), values in VALUES.items():
        found = cell(table, row, str(column))
        assert found["mean"] == pytest.approx(np.mean(values))
        assert found["deviation"] == pytest.approx(np.std(values, ddof=1))
        assert (found["count"], found["num_pairs"]) == (3, 0)


def test_a_baseline_row_gives_paired_differences_and_holm_over_the_rows(tmp_path):
    third = {("third", 0.1): [0.52, 0.61, 0.74]}
    table = table_of(swept_runs(tmp_path, VALUES | third), baseline="plain")
    p_values = []
    for row, values in (("prox", VALUES["prox", 0.1]), ("third", third["third", 0.1])):
        found, difference = cell(table, row, "0.1"), np.subtract(values, VALUES["plain", 0.1])
        expected = stats.ttest_1samp(difference, 0)
        interval = expected.confidence_interval(0.95)
        assert found["difference"] == pytest.approx(difference.mean())
        assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
        assert found["p"] == pytest.approx(expected[1]) and found["num_pairs"] == 3
        p_values.append(expected[1])
    assert [cell(table, row, "0.1")["p_holm"] for row in ("prox", "third")] == pytest.approx(holm(p_values))
    assert np.isnan(cell(table, "plain", "0.1")["difference"]) and cell(table, "plain", "0.1")["num_pairs"] == 0
    # A row without runs there has no value, and is no test of the column.
    assert cell(table, "third", "2.0")["count"] == 0
    assert cell(table, "prox", "2.0")["p_holm"] == cell(table, "prox", "2.0")["p"]


def test_wilcoxons_test_stands_beside_the_paired_t_and_says_where_seeds_are_too_few(tmp_path, runs):
    assert says(table_of(runs, baseline="plain").note, "3 pairs", "0.25", "more seeds")
    values = {
        ("a", 1.0): [0.1] * 7,
        ("b", 1.0): [0.2, 0.3, 0.25, 0.4, 0.6, 0.5, 0.09],
        ("c", 1.0): [0.3, 0.2] * 3 + [0.1],
    }
    table = table_of(swept_runs(tmp_path, values), baseline="a")
    tests = [stats.wilcoxon(np.subtract(values[row, 1.0], 0.1), zero_method="zsplit") for row in "bc"]
    expected = np.array([p for _, p in tests], float)
    assert [cell(table, row, "1.0")["wilcoxon"] for row in "bc"] == pytest.approx(expected)
    assert [cell(table, row, "1.0")["wilcoxon_holm"] for row in "bc"] == pytest.approx(holm(expected))
    assert "pairs is at least" not in table.note


def test_settings_that_are_no_data_sets_rank_nothing(runs):
    assert table_of(runs).ranks == []


def test_a_baseline_column_is_subtracted_from_the_others_of_its_row(runs):
    table = table_of(runs, baseline="0.1")
    found, values = cell(table, "prox", "2.0"), np.subtract(VALUES["prox", 2.0], VALUES["prox", 0.1])
    assert found["difference"] == pytest.approx(values.mean()) and found["num_pairs"] == 3
    heads, rows = written(table)
    assert heads == [
        "case",
        "mu = 0.1",
        "mu = 2.0",
        "vs 0.1",
        "p",
        "Wilcoxon",
        "detectable",
        *["mu = 10.0", *heads[3:7]],
    ]
    # The deviation is 5.508 points, and Student's t with 2 degrees of freedom 4.303: 13.68 = 4.303 * 5.508 / sqrt(3).
    assert rows[1][3] == "+10.67 [-3.01, +24.35]"


def test_runs_that_ended_early_are_said(runs):
    options = ReportOptions(tables=(TableOptions(rows=("case", "method.mu"), values=("megabytes",)),))
    for early in (0, 2):
        some = [replace(run, finished=place >= early) for place, run in enumerate(runs)]
        (table,) = pivots(group_runs(some), options)
        assert ("as far as they came: 2." in table.note) == ("not finished" in table.note) == (early > 0)


def test_pairs_are_matched_by_seed(tmp_path):
    values = {("a", 1.0): [0.1, 0.5, 0.9], ("b", 1.0): [0.1, 0.5, 0.9]}
    runs = swept_runs(tmp_path, values)
    # Without the first seed of a and the last of b one pair is left, whose difference is 0.
    table = table_of([*runs[1:3], *runs[3:5]], baseline="a")
    assert cell(table, "b", "1.0")[["difference", "num_pairs"]].tolist() == [0.0, 1]
    assert written(table)[1][1][1:] == ["30.00 ± 28.28", "+0.00", *[wording.NONE] * 3]


def test_best_and_worst_are_marked_where_the_interval_to_the_next_one_leaves_out_zero(runs):
    marks = {(row, column): cell(table_of(runs), row, column)["mark"] for row, column in product_of(runs)}
    # At 0.1 and 10 the differences are 0.10, 0.11, 0.12; at 2 they are 0.05, -0.05, 0.01.
    assert marks == {
        **dict.fromkeys([("plain", "0.1"), ("plain", "10.0")], "best"),
        **dict.fromkeys([("prox", "0.1"), ("prox", "10.0")], "worst"),
        **dict.fromkeys([("plain", "2.0"), ("prox", "2.0")], ""),
    }


def product_of(runs) -> list[tuple[str, str]]:
    return list(dict.fromkeys((run.experiment["swept"]["case"], run.experiment["swept"]["method.mu"]) for run in runs))


def test_of_a_cost_the_smallest_is_the_best_and_a_seed_without_value_ends_the_marks(tmp_path):
    runs = swept_runs(tmp_path, {("a", 1.0): [0.5, 0.5, 0.5]}, megabytes=3)
    runs += swept_runs(tmp_path, {("b", 1.0): [0.5, 0.5, 0.4]}, megabytes=1)
    table = table_of(runs, values=("uplink_megabytes", "uplink_megabytes@0.5"))
    assert [cell(table, row, "1.0", "uplink_megabytes")["mark"] for row in "ab"] == ["worst", "best"]
    # b never reached 0.5 with one seed, which its mean over the others hides.
    assert [cell(table, row, "1.0", "uplink_megabytes@0.5")["mark"] for row in "ab"] == ["", ""]
    heads, rows = written(table)
    assert heads == ["case", "mu = 1.0: Sent up, MB", "mu = 1.0: Sent up to 50 %, MB"]
    assert rows[1] == ["b", "1.000 ± 0.000 (best)", "1.000 ± 0.000 (2)"]


def test_runs_that_diverged_have_no_interval_and_no_mark(tmp_path):
    values = {("a", 1.0): [math.inf, math.inf], ("b", 1.0): [0.5, 0.4]}
    table = table_of(swept_runs(tmp_path, values), baseline="b")
    assert written(table)[1][0][1:4] == [f"inf ± {wording.NONE}", "+inf", wording.NONE]
    assert not any(table.frame["mark"])


def test_runs_of_different_settings_do_not_share_a_cell(runs):
    with refused(names=["'plain'", "method.mu", "best_over"]):
        table_of(runs, columns=())
    table = pivots(group_runs(runs), ReportOptions(tables=(TableOptions(rows=("case",)),), best_over=("method.mu",)))[0]
    assert table.frame["row"].tolist() == ["plain", "prox"]
    assert table.frame["mean"].tolist() == pytest.approx([0.6, np.mean(VALUES["prox", 2.0])])
    both = table_of(runs, rows="case,method.mu", columns=())
    assert both.frame["row"].tolist()[:2] == ["plain, 0.1", "plain, 2.0"] and len(both.frame) == 6


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"rows": "method.my"}, ["'method.my'", "'method.mu'"]),
        ({"columns": "seed"}, ["'seed'"]),
        ({"baseline": "plane"}, ["'plane'", "'plain'"]),
        ({"values": ("pooled/acuracy",)}, ["'pooled/acuracy'", ACCURACY]),
    ],
)
def test_what_no_run_has_is_refused(runs, options, names):
    with refused(names=names):
        table_of(runs, **options)


def test_axes_may_be_settings_that_no_sweep_has_named(tmp_path):
    runs = [run_of(tmp_path / str(lr), {0: lr}, method={"name": "fedavg", "lr": lr}) for lr in (0.5, 0.25)]
    table = pivots(group_runs(runs), ReportOptions(tables=(TableOptions(rows=("method.lr",)),)))[0]
    assert table.frame["row"].tolist() == ["0.25", "0.5"]
    (labels,) = pivots(group_runs(runs), ReportOptions(tables=(TableOptions(),)))
    assert labels.frame["row"].tolist() == ["run (lr=0.5)", "run (lr=0.25)"]


def test_the_table_of_a_sweep_is_that_of_its_two_settings(runs):
    (table,) = pivots(group_runs(runs), ReportOptions())
    assert (table.options.rows, table.options.columns) == (("case",), ("method.mu",))
    # Where one is tuned, only the case is left, which has no three numbers.
    assert pivots(group_runs(runs), ReportOptions(best_over=("method.mu",))) == []


@pytest.mark.parametrize("swept", [{"a": [1], "b": {"c": None}, "": "\1"}, ["a"], "a"])
def test_a_strangers_items_are_words(tmp_path, swept):
    runs = [run_of(tmp_path / str(lr), {0: 0.5}, swept=swept, method={"lr": lr}) for lr in (1, 2)]
    assert pivots(group_runs(runs), ReportOptions()) == []
    assert pivots(group_runs(runs), ReportOptions(tables=(TableOptions(rows=("method.lr",)),)))[0].to_latex()
    if isinstance(swept, dict):
        table = pivots(group_runs(runs[:1]), ReportOptions(tables=(TableOptions(rows=("a", "")),)))[0]
        assert table.frame["row"].tolist() == ["[1], \1"] and str(table)


def test_settings_with_three_numbers_are_drawn_where_there_are_not_two(tmp_path, runs):
    one = [run for run in runs if run.experiment["swept"]["case"] == "prox"]
    (table,) = pivots(group_runs(one), ReportOptions())
    assert (table.options.rows, table.options.columns) == (("method.mu",), ())
    figure = sections(group_runs(one), [ACCURACY], [table])[1].figures[0]
    (row,) = figure.chart["data"]["values"]
    assert row["mu"] == [0.1, 2.0, 10.0]
    assert row["value"] == pytest.approx([np.mean(VALUES["prox", mu]) for mu in row["mu"]])
    lows = [np.mean(VALUES["prox", mu]) - np.std(VALUES["prox", mu], ddof=1) for mu in row["mu"]]
    assert row["low"] == pytest.approx(lows)


def test_lines_are_the_items_of_the_other_axis_and_large_spans_are_logarithmic(runs):
    figure = sections(group_runs(runs), [ACCURACY], [table_of(runs)])[1].figures[0]
    assert [row["series"] for row in figure.chart["data"]["values"]] == ["plain", "prox"]
    assert {one["name"]: one["value"] for one in figure.chart["params"]}["log_x"]
    turned = table_of(runs, rows="method.mu", columns="case")
    assert sections(group_runs(runs), [ACCURACY], [turned])[1].figures[0] == figure
    few = [run for run in runs if run.experiment["swept"]["method.mu"] != "10.0"]
    assert all(one.title != "Against swept settings" for one in sections(group_runs(few), [ACCURACY], [table_of(few)]))


def test_the_formats_write_marks_and_escape_what_they_must(tmp_path):
    name = r"50% of {a_b} & ~^\ <x>|*"
    table = table_of(swept_runs(tmp_path, {(name, 1.0): [0.5, 0.6], ("b", 1.0): [0.2, 0.31]}), baseline="b")
    assert table.to_markdown().splitlines()[2] == (
        r"| 50% of {a\_b} & ~^\\ \<x>\|\* | **55.00 ± 7.07** | +29.50 \[+23.15, +35.85] | 0.011 | 0.5 | 2.58 |"
    ).replace("2.58", written(table)[1][0][-1])
    latex = table.to_latex().splitlines()
    assert latex[:4] == [
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        r"case & \multicolumn{5}{c}{mu = 1.0} \\",
        r" & mean $\pm$ sd & vs b & p & Wilcoxon & detectable \\",
    ]
    escaped = r"50\% of \{a\_b\} \& \textasciitilde \textasciicircum \textbackslash \space $<$x$>$|*"
    assert latex[5].startswith(rf"{escaped} & \textbf{{55.00 $\pm$ 7.07}} & +29.50 [")
    assert latex[6].startswith(rf"b & \underline{{25.50 $\pm$ 7.78}} & {wording.NONE} &")
    pd.testing.assert_frame_equal(
        pd.read_csv(io.StringIO(table.to_csv()), keep_default_na=False, na_values=[""]).fillna({"mark": ""}),
        table.frame.astype({"column": float}),
    )
    assert "(best)" in str(table) and table.title in str(table) and table.note in str(table)


@pytest.mark.machine("pdflatex", package="texlive-latex-base")
def test_latex_compiles(tmp_path):
    runs = swept_runs(tmp_path / "runs", VALUES | {(r"50% {a_b} & ~^\ <x> $é", 0.1): [0.1, 0.2, 0.4]})
    body = "\n\n".join(table_of(runs, baseline=base).to_latex() for base in (None, "plain", "0.1"))
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_python_the_command_and_the_page_show_the_same_table(tmp_path, runs):
    table = SweepResults(tmp_path, [*map(RunResults, runs)]).table("case", "method.mu", baseline=0.1)
    grid = ["--rows", "case", "--columns", "method.mu", "--baseline", "0.1"]
    printed = rayfl("table", tmp_path, *grid)
    assert printed.exit_code == 0 and printed.output.strip() == str(table)
    for ending, content in (("csv", table.to_csv()), ("md", table.to_markdown()), ("tex", table.to_latex())):
        file = tmp_path / f"table.{ending}"
        assert rayfl("table", tmp_path, *grid, "--output", file).exit_code == 0
        assert file.read_text(encoding="utf-8") == content
    refused(rayfl("table", tmp_path, *grid, "--output", file), names=["table.tex", "--overwrite"])
    assert rayfl("table", tmp_path, "--format", "md", "--output", file, "--overwrite").exit_code == 0
    assert file.read_text(encoding="utf-8").startswith("| case |")
    page = tmp_path / "page.html"
    assert rayfl("report", tmp_path, *grid, "--output", page).exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert mentions(heading(html, "table1"), "case and mu") and "+10.67 [-3.01, +24.35]" in unescape(html)


def test_a_command_without_a_table_to_show_says_what_to_name(tmp_path):
    runs = [run_of(tmp_path / str(seed), {0: 0.5}, seed=seed) for seed in range(2)]
    refused(rayfl("table", tmp_path), names=["--rows", "--columns"])
    assert rayfl("table", runs[0].directory, "--values", "rounds").exit_code == 0
    refused(rayfl("report", runs[0].directory, "--rows", "label"), names=["--rows", "rayfl table"])


def test_a_page_says_why_its_tables_are_left_out(tmp_path, runs):
    options = ReportOptions(tables=(TableOptions(rows=("topology",)), TableOptions()))
    html = report([run.directory for run in runs], tmp_path / "page.html", options).read_text(encoding="utf-8")
    (line,) = [line for line in html.splitlines() if "[[report.tables]]" in line]
    assert mentions(line, "topology") and mentions(heading(html, "table1"), "by label")
    assert heading(html, "table2") == ""


def test_figures_and_tables_become_files(tmp_path, runs):
    folder = tmp_path / "figures"
    done = rayfl("report", tmp_path, "--output", tmp_path / "page.html", "--figures", folder)
    assert done.exit_code == 0 and str(folder) in done.output
    kinds = {suffix: [path for path in folder.iterdir() if path.suffix == suffix] for suffix in (".svg", ".pdf")}
    assert len(kinds[".svg"]) == len(kinds[".pdf"]) > 2
    assert all("<svg" in path.read_text(encoding="utf-8")[:200] for path in kinds[".svg"])
    assert all(path.read_bytes().startswith(b"%PDF") for path in kinds[".pdf"])
    (curve,) = [path for path in kinds[".svg"] if "against-mu" in path.name]
    assert all(f">{word}<" in curve.read_text(encoding="utf-8") for word in ("plain", "prox", "mu"))
    (table,) = folder.glob("*by-case-and-mu.tex")
    assert table.read_text(encoding="utf-8") == table_of(runs).to_latex()
    (ranking,) = folder.glob("*best-first.csv")
    assert pd.read_csv(ranking)["Run"].tolist()[0] == "plain, mu=0.1"
    results = SweepResults(tmp_path, [*map(RunResults, runs)])
    with refused(names=[str(folder), "--overwrite"]):
        results.save_figures(folder)
    assert {*results.save_figures(folder, overwrite=True)} == {*folder.iterdir()}


def test_figures_with_long_titles_have_short_names_of_their_own(tmp_path):
    runs = [run_of(tmp_path / f"run{seed}", {0: 0.5, 1: 0.6}, seed=seed) for seed in (1, 2)]
    # The titles of both tables begin with those of all costs, together more than a name may have.
    tables = [TableOptions(rows=("label",), values=(*COSTS, f"{ACCURACY}:{way}")) for way in ("final", "best")]
    paths = write_figures(runs, tmp_path / "figures", ReportOptions(tables=tuple(tables)))
    long = [path.name for path in paths if len(path.name) > 150]
    assert len({*long}) == 4 and all(len(name) < 200 for name in long)


def test_a_single_run_has_figures_and_no_table_by_settings(tmp_path):
    run = run_of(tmp_path / "run", {0: 0.5, 1: 0.6})
    paths = write_figures([run], tmp_path / "figures", ReportOptions())
    assert {path.suffix for path in paths} == {".svg", ".pdf", ".csv", ".tex"}
