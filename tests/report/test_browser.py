"""Pages in a real browser: nothing is complained of or loaded, nothing sticks out, and every control does its work."""

import csv
import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from rayfl.report.page import report
from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow
from rayfl.run_directory.description import describe_run
from rayfl.run_directory.record import Recorder
from rayfl.run_directory.run_folder import create_run_directory
from tests.report.browser import chromium, drawn, executable, open_page, played
from tests.report.test_page import record

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium here: apt-get install chromium")

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
    small = {"rounds": 3, "clients": {"count": 4, "uplink_mbps": 1.0}, "model": "logistic"}
    methods = [
        played(folder / name, name=name, seed=1, method=name, evaluation={"every": 1}, **small)
        for name in ("fedavg", "fedpse", "local")
    ]
    peers = played(
        folder / "peers",
        **{**small, "rounds": 2, "clients": {"count": 4, "retention_ratio": {"groups": [0.2, 0.5]}}},
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
    describe_run(hostile, {"name": EVIL, "seed": 1, EVIL: {EVIL: EVIL}, "method": EVIL}, {EVIL: EVIL}, "")
    with Recorder(hostile) as recorder:
        for round in range(2):
            names = (EVIL, QUOTES, f"{EVIL}/accuracy")
            metrics = [MetricRow(client, name, 0.5) for client in (None, 0) for name in names]
            recorder.round(RoundRow(round, 1, 0, 8, 8, 1.0, 1.0), [ClientRow(0, EVIL, 8, 8, 1, 1, 1.0)], metrics)
    return {
        "methods": report(methods, folder / "methods.html"),
        "peers": report([peers], folder / "peers.html"),
        "strange": report(strange, folder / "strange.html"),
        "hostile": report([hostile], folder / "hostile.html"),
    }


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(
    ("name", "scheme"), [("methods", "light"), ("peers", "dark"), ("strange", "light"), ("hostile", "dark")]
)
def test_nothing_is_complained_of_loaded_or_too_wide(browser, pages, name, width, scheme):
    complaints: list[str] = []
    page = open_page(browser, pages[name], width, scheme, complaints)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".vega svg, .vega canvas").count() == page.locator("figure").count() > 3
    assert pages[name].stat().st_size < 2_000_000
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    assert dark == (scheme == "dark")
    labels = page.locator(".vega svg .role-axis-label text").first.get_attribute("fill")
    assert labels == ("#a3acb9" if scheme == "dark" else "#5a6472")
    if name == "hostile":
        # Rounds 0 and 1, and no label for what lies between.
        axis = page.locator(".vega svg").first.locator(".role-axis-label").first.locator("text").all_text_contents()
        assert [label for label in axis if label] == ["0", "1"]
    page.context.close()


@pytest.fixture
def page(browser, pages):
    complaints: list[str] = []
    found = open_page(browser, pages["methods"], 1280, "light", complaints)
    yield found
    found.context.close()
    assert complaints == []


def accuracy(page):
    """The first chart of lines."""
    return page.locator("figure").filter(has=page.get_by_role("button", name="Logarithmic y axis")).first


def texts(figure) -> list[str]:
    return figure.locator(".vega svg text").all_text_contents()


def test_the_switches_change_what_is_drawn(page):
    figure, lines = accuracy(page), ".mark-line.role-mark path"
    assert "Round" in texts(figure)
    before = figure.locator(lines).last.get_attribute("d")
    page.get_by_label("bytes up", exact=True).check()
    drawn(page)
    assert "Sent up so far, MB" in " ".join(texts(figure)) and figure.locator(lines).last.get_attribute("d") != before
    # Local training sends nothing.
    assert figure.locator(".still").inner_text() == "Not drawn, as nothing of it is above zero: local."
    page.get_by_label("rounds", exact=True).check()
    drawn(page)
    assert figure.locator(lines).last.get_attribute("d") == before and figure.locator(".still").inner_text() == ""
    page.locator("[name=smooth]").fill("0.8")
    drawn(page)
    assert figure.locator(lines).last.get_attribute("d") != before
    log = figure.get_by_role("button", name="Logarithmic y axis")
    log.click()
    figure.get_by_text("Accuracy, % (logarithmic)").wait_for()
    assert log.get_attribute("aria-pressed") == "true"


def test_an_entry_of_a_legend_hides_its_line_everywhere(page):
    figure, lines = accuracy(page), ".mark-line.role-mark path[stroke-width='2']"
    assert figure.locator(lines).count() == 3
    entries = page.locator(".legend button").filter(has_text="local")
    entries.first.focus()
    page.keyboard.press("Enter")
    drawn(page)
    assert figure.locator(lines).count() == 2
    assert {one.get_attribute("aria-pressed") for one in entries.all()} == {"false"} and entries.count() > 1
    entries.first.dblclick()
    drawn(page)
    assert figure.locator(lines).count() == 1


def test_charts_are_zoomed_by_keys_and_tell_their_values(page):
    figure = accuracy(page)
    before = texts(figure)
    figure.locator(".chart").focus()
    for _ in range(5):
        page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert texts(figure) != before
    page.keyboard.press("0")
    expect(figure.locator(".vega svg text")).to_have_text(before, timeout=240_000)
    figure.locator(".vega svg").hover(position={"x": 300, "y": 100})
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert re.fullmatch(
        r"Run\s+(fedavg|fedpse|local)\s+Round\s+\d\s+Accuracy, %\s+\d+\.\d\d %\s*", tooltip.inner_text()
    )


def test_charts_can_be_saved(page, tmp_path):
    figure = accuracy(page)
    found = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as download:
            figure.get_by_text(kind, exact=True).click()
        assert download.value.suggested_filename.endswith(f".{kind.lower()}")
        download.value.save_as(tmp_path / kind)
        found[kind] = (tmp_path / kind).read_bytes()
    assert found["PNG"].startswith(b"\x89PNG\r\n") and found["SVG"].startswith(b"<svg ")
    # The file has the legend that stands beside the chart on the page.
    assert all(f">{name}</text>" in found["SVG"].decode() for name in ("fedavg", "fedpse", "local"))
    head, *rows = csv.reader(found["CSV"].decode().splitlines())
    assert head == ["series", "round", "up", "both", "time", "value"]
    assert len(rows) == 9 and {row[0] for row in rows} == {"fedavg", "fedpse", "local"}


def test_a_click_on_a_heading_sorts(page):
    table = page.locator("#runs ~ .sortable table").first
    runs = table.locator("tbody th")
    head = table.get_by_role("button", name="Up", exact=True)
    head.click()
    # Local training sends nothing, and a dense update of FedAvg is the largest.
    assert [one.inner_text() for one in runs.all()][::2] == ["local", "fedavg"]
    assert head.locator("xpath=..").get_attribute("aria-sort") == "ascending"
    page.get_by_role("link", name="What the runs share").click()
    assert page.url.endswith("#settings")


def test_accuracies_stay_within_100_percent_and_span_a_point(browser, pages):
    page = open_page(browser, pages["strange"], 1280, "light", [])
    for name in ("=image", EVIL):
        assert page.locator(".legend button").filter(has_text=name).count() > 0
    page.locator(".legend button").filter(has_text=EVIL).first.click()
    drawn(page)
    shown = [text for text in texts(accuracy(page)) if text.endswith("%") and text[0].isdigit()]
    assert shown[0] == "99%" and shown[-1] == "100%"
    page.context.close()
