"""Pages in a real browser: nothing is complained of or loaded, nothing sticks out, and every control does its work."""

import csv
import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from rayfl.report.page import report
from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder
from rayfl.run_directory.run_folder import create_run_directory
from tests.report.browser import BROWSERS, chromium, open_page, played
from tests.report.test_page import record

pytestmark = pytest.mark.machine(*BROWSERS)

EVIL = '<img src="x" onerror="alert(1)"></script><script>alert(2)</script>'
QUOTES = '\\"+\'\\"'


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A comparison of methods, a run among peers with masks, and runs of strange names and numbers."""
    folder = tmp_path_factory.mktemp("pages")
    small = {"rounds": 3, "clients": {"count": 4, "examples_per_s": 500.0}, "model": "logistic"}
    classes = {**small, "clients": {"count": 5, "unseen": 0.2}}
    methods = [
        played(folder / name, name=name, seed=1, method=name, evaluation={"every": 1}, **small)
        for name in ("fedavg", "fedpse", "local")
    ]
    peers = played(
        folder / "peers",
        **{**small, "rounds": 2, "clients": {"count": 4, "retention_ratio": [0.2, 0.5]}},
        method="dispfl",
        topology="ring",
        evaluation={"every": 1, "masks": True},
    )
    strange = [
        record(folder / "a", [math.nan, math.inf, 0.5, 0.5], label=EVIL, drop=True),
        record(folder / "b", [1.0] * 4, label="=image", training={"lr": 1}),
        record(folder / "c", [1.0] * 4, label="x" * 200, training={"lr": 2}),
    ]
    hostile = create_run_directory(folder / "hostile")
    Description({"name": EVIL, "seed": 1, EVIL: {EVIL: EVIL}, "method": EVIL}).write(hostile, {EVIL: EVIL})
    with Recorder(hostile) as recorder:
        for round in range(2):
            names = (EVIL, QUOTES, f"{EVIL}/accuracy")
            metrics = [MetricRow(client, name, 0.5) for client in (None, 0) for name in names]
            recorder.round(RoundRow(round, 1, 0, 8, 8, 1.0, 1.0), [ClientRow(0, EVIL, 8, 8, 1, 1, 1.0)], metrics)
    metrics = ["accuracy", "recall", "ece", "confusion"]
    by_class = [
        played(folder / f"{name}-classes", name=name, seed=1, method=name, evaluation={"metrics": metrics}, **classes)
        for name in ("fedavg", "ditto")
    ]
    return {
        "classes": report(by_class, folder / "classes.html"),
        "methods": report(methods, folder / "methods.html"),
        "peers": report([peers], folder / "peers.html"),
        "strange": report(strange, folder / "strange.html"),
        "hostile": report([hostile], folder / "hostile.html"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("classes", "light"), ("methods", "light"), ("peers", "dark"), ("strange", "light"), ("hostile", "dark")],
)
def test_nothing_is_complained_of_loaded_or_too_wide(browser, pages, name, width, scheme):
    complaints: list[str] = []
    page = open_page(browser, pages[name], width, scheme, complaints)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # A figure whose values are all the same has its number in words, and no chart.
    num_charts = page.locator("figure .chart").count()
    assert page.locator("svg.marks, canvas.marks").count() == num_charts and page.locator("figure").count() > 3
    assert pages[name].stat().st_size < 2_000_000
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    assert dark == (scheme == "dark")
    assert num_charts > 3 or name == "hostile"
    if num_charts:
        labels = page.locator("svg.marks .role-axis-label text").first.get_attribute("fill")
        assert labels == ("#a3acb9" if scheme == "dark" else "#5a6472")
    if name == "hostile" and num_charts:
        # Rounds 0 and 1, and no label for what lies between.
        axis = page.locator("svg.marks").first.locator(".role-axis-label").first.locator("text").all_text_contents()
        assert [label for label in axis if label] == ["0", "1"]
    page.context.close()


@pytest.fixture
def page(browser, pages):
    complaints: list[str] = []
    found = open_page(browser, pages["methods"], 1280, "light", complaints)
    yield found
    found.context.close()
    assert complaints == []


def test_classes_bins_and_a_matrix_are_one_figure_each(browser, pages):
    page = open_page(browser, pages["classes"], 1280, "light", [])
    titles = page.locator("figure").evaluate_all("all => all.map(one => one.dataset.title)")
    # Of each place a figure of recall by class, with a line for each run and a dot for each class.
    by_class = [title for title in titles if title.startswith("Recall") and "by class" in title]
    assert len(by_class) == len({*by_class}) >= 3 and not [title for title in titles if "Recall: 3" in title]
    figure = page.locator("figure[data-title*='Own test data, after the exchange, by class']")
    assert len(lines(figure)) == 2 and figure.locator(".mark-symbol.role-mark path").count() == 20
    assert {"0", "9", "Class"} <= {*texts(figure)}
    # Each run has a calibration figure with a dot for each bin, and a matrix of 10 x 10 cells.
    for name in ("fedavg", "ditto"):
        calibration = page.locator(f"figure[data-title^='Calibration error'][data-title$='{name}']")
        shown = [one.get_attribute("opacity") for one in calibration.locator(".mark-symbol.role-mark path").all()]
        assert len(shown) > 4 and {*shown} == {"1"}, name
    matrix = page.locator("figure[data-title^='Confusion matrix'][data-title$='fedavg'] .mark-rect.role-mark path")
    assert matrix.count() == 100
    # Parts of metrics over clients are folded, and unseen clients have their own rows.
    words = page.locator("#fairness ~ details summary").all_text_contents()
    assert any("Recall: 3: Unseen clients" in one for one in words)
    page.locator("#fairness ~ details").first.locator("summary").click()
    assert page.locator("#fairness ~ details").first.locator("tbody tr").count() == 2
    page.context.close()


def accuracy(page):
    """The first chart of lines."""
    return page.locator("figure").filter(has=page.locator(".vega-bindings select")).first


def texts(figure) -> list[str]:
    return figure.locator(".chart svg.marks text").all_text_contents()


def lines(figure) -> list[str]:
    """The paths of the lines that are drawn."""
    found = figure.locator(".mark-line.role-mark path").all()
    return [path for one in found if (path := one.get_attribute("d"))]


def test_inputs_change_what_is_drawn(page):
    figure = accuracy(page)
    before = lines(figure)
    assert len(before) == 3 and "Round" in texts(figure)
    figure.locator("select").select_option("Sent up so far, MB")
    figure.locator("svg.marks").get_by_text("Sent up so far, MB").wait_for()
    against_bytes = lines(figure)
    # Local training sends nothing: its line has one place.
    assert against_bytes != before
    figure.locator("[name=log_x]").check()
    expect(figure.locator(".mark-line.role-mark path")).to_have_count(2)
    figure.locator("[name=log_x]").uncheck()
    figure.locator("select").select_option("Round")
    figure.locator("svg.marks").get_by_text("Round", exact=True).wait_for()
    assert sorted(lines(figure)) == sorted(before)
    last = lines(figure)[-1]
    figure.locator("[name=smooth]").check()
    expect(figure.locator(".mark-line.role-mark path").last).not_to_have_attribute("d", last)


def test_an_entry_of_a_legend_shows_its_line_alone(page):
    figure = accuracy(page)
    figure.locator(".role-legend-label text").get_by_text("local").click()
    expect(figure.locator(".mark-line.role-mark path")).to_have_count(1)
    figure.locator(".role-legend-label text").get_by_text("fedpse").click(modifiers=["Shift"])
    expect(figure.locator(".mark-line.role-mark path")).to_have_count(2)
    figure.locator("svg.marks").dblclick(position={"x": 400, "y": 150})
    expect(figure.locator(".mark-line.role-mark path")).to_have_count(3)


def test_points_show_their_values_to_the_pointer(page):
    figure = accuracy(page)
    figure.locator(".mark-symbol.role-mark path").nth(1).hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    cells = [cell.strip() for cell in tooltip.inner_text().splitlines() if cell.strip()]
    words = dict(zip(cells[::2], cells[1::2], strict=True))
    assert words["Run"] in ("fedavg", "fedpse", "local") and words["Round"] == "1"
    assert re.fullmatch(r"\d+\.\d\d%", words["Accuracy, %"])


def test_charts_and_numbers_can_be_saved(page, tmp_path):
    figure = accuracy(page)
    for kind, beginning in (("PNG", b"\x89PNG\r\n"), ("SVG", b"<svg ")):
        figure.locator(".chart summary").click()
        with page.expect_download() as download:
            figure.get_by_text(f"Save as {kind}").click()
        assert download.value.suggested_filename.endswith(f".{kind.lower()}")
        download.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(beginning)
        figure.locator(".chart summary").click()
    # The file has a legend.
    assert all(f">{name}</text>" in (tmp_path / "SVG").read_text() for name in ("fedavg", "fedpse", "local"))
    page.locator("#numbers summary").click()
    with page.expect_download() as download:
        page.locator("#numbers button").click()
    download.value.save_as(tmp_path / "CSV")
    rows = list(csv.DictReader((tmp_path / "CSV").read_text().splitlines()))
    assert f"{len(rows)} rows." in page.locator("#numbers").inner_text()
    first = figure.get_attribute("data-title")
    found = [row for row in rows if row["chart"] == first]
    assert len(found) == 9 and {row["series"] for row in found} == {"fedavg", "fedpse", "local"}
    assert [row["Round"] for row in found] == ["0", "1", "2"] * 3 and all(
        0 <= float(row["value"]) <= 1 for row in found
    )


def test_a_click_on_a_heading_sorts(page):
    table = page.locator("#runs ~ .sortable table").first
    runs = table.locator("tbody th")
    head = table.get_by_role("button", name="Up", exact=True)
    head.click()
    # Local training sends nothing, and a dense update of FedAvg is the largest.
    assert [one.inner_text() for one in runs.all()][::2] == ["local", "fedavg"]
    assert head.locator("xpath=..").get_attribute("aria-sort") == "ascending"
    head.click()
    assert [one.inner_text() for one in runs.all()][::2] == ["fedavg", "local"]
    assert head.locator("xpath=..").get_attribute("aria-sort") == "descending"
    page.get_by_role("link", name="What the runs share").click()
    assert page.url.endswith("#settings")


def test_a_table_of_runs_with_seeds_is_whole_at_1280_pixels_and_can_be_saved(browser, tmp_path):
    names = ("own/accuracy", "own_after_training/accuracy", "pooled/accuracy")
    runs = []
    for label in ("FedAvg & co", "FedPSE (keep 10_%)", "local|alone"):
        for seed in (1, 2, 3):
            runs.append(create_run_directory(tmp_path / f"{label[:4]}{seed}"))
            Description({"name": "a", "label": label, "seed": seed, "method": {"name": label}}).write(runs[-1], {})
            with Recorder(runs[-1]) as recorder:
                for round in range(3):
                    metrics = [MetricRow(None, name, 0.1 * seed + 0.2 * round) for name in names]
                    recorder.round(RoundRow(round, 1, 1, 800_000_000, 800_000_000, 123.0, 1.0), [], metrics)
    page = open_page(browser, report(runs, tmp_path / "page.html"), 1280, "light", [])
    region = page.locator("#runs ~ .sortable").first
    assert region.locator("thead th").count() == 11
    assert region.evaluate("one => one.scrollWidth <= one.clientWidth")
    saved = {}
    for kind in ("CSV", "LaTeX", "Markdown"):
        with page.expect_download() as download:
            page.locator("#runs ~ .export").first.get_by_role("button", name=kind).click()
        download.value.save_as(tmp_path / kind)
        saved[kind] = (tmp_path / kind).read_text(encoding="utf-8")
    rows = list(csv.reader(saved["CSV"].splitlines()))
    assert rows[0][:3] == ["Run", "Seeds", "Rounds"] and {row[0] for row in rows[1:]} == {
        "FedAvg & co", "FedPSE (keep 10_%)", "local|alone",
    }  # fmt: skip
    head = "Final, smoothed: Accuracy: Shared model, pooled test set"
    assert rows[0][3:6] == [f"{head}, %", f"{head}, sd", f"{head}, n"]
    assert rows[1][1:7] == ["1, 2, 3", "3", "40", "10", "3", "60"]
    lines = saved["LaTeX"].splitlines()
    assert lines[0] == "\\begin{tabular}{lrrrrrrrrrr}" and lines[-1] == "\\end{tabular}" and len(lines) == 9
    assert "FedPSE (keep 10\\_\\%) & 1, 2, 3 & 3 & 40.0 $\\pm$ 10.0 \\% (3) &" in saved["LaTeX"]
    assert "FedAvg \\& co & " in saved["LaTeX"]
    assert saved["Markdown"].splitlines()[1] == "|" + " --- |" * 11 and "| local\\|alone |" in saved["Markdown"]
    page.context.close()


def test_hostile_names_are_shown_as_words(browser, pages):
    page = open_page(browser, pages["strange"], 1280, "light", [])
    shown = page.locator(".role-legend-label text").all_text_contents()
    assert any(text.startswith("<img src=") for text in shown) and "=image" in shown
    page.context.close()
