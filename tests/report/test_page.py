import json
import math
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rayfl.experiment.report_options import ReportOptions
from rayfl.report import wording
from rayfl.report.page import report, vega_javascript
from rayfl.report.summary import summary
from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.hand_written import heading
from tests.refusals import line_with, mentions, refused


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, and the text of table rows, cards and headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.in_cell = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data

    def row(self, head: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == head)


def record(
    directory: Path,
    accuracy: Sequence[float],
    *,
    seed: int = 1,
    drop: bool = False,
    finish: bool = True,
    **more: object,
) -> Path:
    """Two clients, own accuracy 0.05 above and below `accuracy`; each sends 0.5 MB up and 0.25 MB down a round.

    With `drop`, client 1 drops out of round 0 before the download. A round takes 4 simulated and 0.5 real seconds.
    """
    create_run_directory(directory)
    experiment = {
        "name": directory.name,
        "seed": seed,
        "method": {"name": "fedpse"},
        "data": {"name": "digits"},
        **more,
    }
    Description(experiment).write(directory, {"torch": "2.13.0"})
    recorder = Recorder(directory)
    for round, value in enumerate(accuracy):
        clients = [ClientRow(0, "delivered", 4_000_000, 2_000_000, 10, 2, 4.0)]
        if drop and round == 0:
            clients.append(ClientRow(1, "dropped_before_download", 0, 0, 0, 0, 0.0))
        else:
            clients.append(clients[0]._replace(client=1))
        up, down = sum(row.uplink_bits for row in clients), sum(row.downlink_bits for row in clients)
        delivered = sum(row.status == "delivered" for row in clients)
        metrics = [
            MetricRow(None, "pooled/accuracy", value),
            MetricRow(0, "own/accuracy", value + 0.05),
            MetricRow(1, "own/accuracy", value - 0.05),
            MetricRow(0, "train/loss", 2.0 / (round + 1)),
            MetricRow(0, "correlation_distance", 0.5),
        ]
        recorder.round(RoundRow(round, 2, delivered, up, down, 4.0, 0.5), clients, metrics)
    recorder.close() if finish else recorder.stop()
    return directory


def charts(html: str) -> dict:
    """The specifications of the page's charts."""
    return json.loads(html.partition('id="charts">')[2].partition("</script>")[0])["charts"]


def rendered(directories: Sequence[Path], tmp_path: Path, target: float | None = None) -> tuple[str, Page]:
    options = ReportOptions(target=target)
    html = report(directories, tmp_path / "pages" / "report.html", options).read_text(encoding="utf-8")
    return html, Page(html)


def test_summary_gives_the_numbers_of_the_run(tmp_path):
    run = read_run(record(tmp_path / "run", [0.2, 0.8, 0.6], drop=True))
    found = summary(run)
    # The two clients have 0.55 and 0.65 at the end.
    over_clients = {"mean": 0.6, "deviation": 0.05, "worst_tenth": 0.55, "worst": 0.55, "best": 0.65}
    over_clients |= {"difference": 0.1, "jain": 1.2**2 / (2 * (0.55**2 + 0.65**2)), "left_out": 0}
    # Six client rounds, one of them dropped: 5 x 0.5 MB up, 5 x 0.25 MB down.
    assert found == {
        "name": "run",
        "directory": str(tmp_path / "run"),
        "finished": True,
        "rounds": 3,
        "early_stop": "",
        "resources": {},
        "final": {"pooled/accuracy": 0.6, "own/accuracy": pytest.approx(0.6)},
        "best": {
            "pooled/accuracy": {"value": 0.8, "round": 1},
            "own/accuracy": {"value": pytest.approx(0.8), "round": 1},
        },
        "units": {"pooled/accuracy": "%", "own/accuracy": "%"},
        "fairness": {"own/accuracy": pytest.approx(over_clients)},
        "privacy": {},
        "uplink_megabytes": 2.5,
        "downlink_megabytes": 1.25,
        "uplink_kilobytes_per_client_round": 500.0,
        "downlink_kilobytes_per_client_round": 250.0,
        "clients_per_round": pytest.approx(5 / 3),
        "steps_per_client_round": 2.0,
        "examples_per_client_round": 10.0,
        "selected": 6,
        "delivered": 5,
        "simulated_s": 12.0,
        "wall_s": 1.5,
    }


def test_the_page_of_one_run_shows_its_numbers_and_settings(tmp_path):
    run = record(
        tmp_path / "run", [0.2, 0.8, 0.6], drop=True, training={"lr": 0.05, "sizes": [32, 16], "nesterov": False}
    )
    html, page = rendered([run], tmp_path)
    text = " ".join(page.text)
    for expected in (
        "60.0 %",
        "2.50 MB",
        "500.0 kB",
        "1.25 MB",
        "12.0 s",
        "dropped before download",
        *(wording.title(name) for name in ("train/loss", "correlation_distance", "own/accuracy")),
        wording.metric("correlation_distance").meaning,
    ):
        assert expected in text
    line_with(page.text, ["2 clients", "fedpse", "digits", "3 rounds"])
    # Of both accuracies.
    assert sum(all(mentions(text, fact) for fact in ("best", "80.0 %", "round 1")) for text in page.text) == 2
    assert page.row("training") == ["lr 0.05sizes 32, 16nesterov no"]
    assert page.row("experiment") == ["name runseed 1"]
    assert page.row("platform") == ["torch 2.13.0"]
    # The one warning is for browsers without JavaScript.
    assert page.attributes.count(("class", "warning")) == 1
    # Accuracy, spread and end of own accuracy, bytes, two other metrics, of which one never changes.
    assert page.tags.count("figure") == page.tags.count("figcaption") == 6 == len(charts(html)) + 1
    assert text.count("the same at all times") == 1


def test_what_did_not_happen_is_not_plotted(tmp_path):
    _, page = rendered([record(tmp_path / "run", [0.2, 0.8])], tmp_path)
    assert page.tags.count("figure") == 6


def against(chart: dict) -> list[str]:
    """What the lines of a chart can be drawn against."""
    return chart["params"][0].get("bind", {}).get("options", [])


def test_a_run_that_sends_nothing_is_not_to_be_drawn_against_bytes(tmp_path):
    directory = create_run_directory(tmp_path / "local")
    Description({"method": "local", "seed": 1}).write(directory, {})
    with Recorder(directory) as recorder:
        recorder.round(RoundRow(0, 1, 1, 0, 0, 0.0, 0.1), [], [MetricRow(None, "own/accuracy", 0.5)])
    html, page = rendered([directory], tmp_path)
    assert against(charts(html)["chart1-1"]) == []
    assert "0 MB" in page.text


def test_several_runs_are_ranked_grouped_by_seed_and_told_what_they_spent(tmp_path):
    slow = record(tmp_path / "slow", [0.1, 0.2, 0.45], training={"lr": 0.01})
    fast = [
        record(tmp_path / f"fast-seed{seed}", values, seed=seed, training={"lr": 0.1})
        for seed, values in ((1, [0.3, 0.46, 0.48]), (2, [0.3, 0.44, 0.52]))
    ]
    html, page = rendered([slow, *fast], tmp_path, target=0.23)
    prices, ranking, work = (
        [row for row in page.rows if row and row[0] in ("fast", "slow")][at : at + 2] for at in (0, 2, 4)
    )
    # The means of the last three: 1.24 / 3 and 1.26 / 3, whose deviation is 0.02 / 3 / sqrt(2) = 0.0047; 0.75 / 3.
    # Mean of 0.48 and 0.52, deviation 0.04 / sqrt(2) = 0.028; 3 rounds x 2 clients x 0.5 (0.25) MB.
    spent = ["3.00 MB", "1.50 MB", "12.0 s", "1.5 s"]
    smoothed, last = "41.7 \u00b1 0.5 % (2)", "50.0 \u00b1 2.8 % (2)"
    assert ranking[0] == ["fast", "1, 2", "3", smoothed, last, last, *spent]
    assert ranking[1] == ["slow", "1", "3", "25.0 % (1)", "45.0 % (1)", "45.0 % (1)", *spent]
    assert work == [["slow", "2", "2", "10"], ["fast", "2", "2", "10"]]
    # Both seeds of fast pass the target in round 0, slow in round 2; a round costs 1.5 MB, 1 MB of it up, and 4 s.
    assert mentions(heading(html, "target"), "23 %")
    assert prices[0] == [
        "fast",
        "2 of 2 seeds",
        "1 \u00b1 0 (2)",
        "1.00 \u00b1 0.00 MB (2)",
        "1.50 \u00b1 0.00 MB (2)",
        "4.0 \u00b1 0.0 s (2)",
        smoothed,
    ]
    assert prices[1] == ["slow", "yes", "3 (1)", "3.00 MB (1)", "4.50 MB (1)", "12.0 s (1)", "25.0 % (1)"]
    assert "(n = 1 to 2)" in " ".join(page.text)
    assert page.row("training.lr") == ["0.01", "0.1"]
    # Final accuracy over bytes, two accuracies, the clients' end, up, down, loss, correlation distance.
    assert page.tags.count("figure") == 8
    options = against(charts(html)["chart1-1"])
    assert options[0] == "Round" and len(options) == 4


def test_a_target_that_one_seed_missed_says_so(tmp_path):
    runs = [record(tmp_path / f"run{seed}", [last], seed=seed) for seed, last in ((1, 0.9), (2, 0.1))]
    _, page = rendered(runs, tmp_path, target=0.47)
    # Neither seed nor name is what the runs share.
    assert "experiment" not in [row[0] for row in page.rows]
    assert ["1 of 2 seeds", "1 (1)", "1.00 MB (1)"] in [row[1:4] for row in page.rows if row[0] == "run"]


def test_seeds_of_different_length_and_those_without_a_measurement_are_told(tmp_path):
    runs = [
        record(tmp_path / f"run{seed}", values, seed=seed)
        for seed, values in ((1, [0.2, 0.6, 0.8]), (2, [0.4, 0.5]), (3, []))
    ]
    _, page = rendered(runs, tmp_path)
    line_with(page.text, ["measured", "run3, seed 3"])
    line_with(page.text, ["length", "run", "seed"])
    assert "(n = 2)" in " ".join(page.text)
    # Last values 0.8 and 0.5: a deviation of 0.3 / sqrt(2).
    assert "65.0 \u00b1 21.2 % (2)" in [cell for row in page.rows for cell in row]


def test_a_table_can_be_sorted_by_its_headings(tmp_path):
    runs = [record(tmp_path / name, [last], lr=last) for name, last in (("low", 0.3), ("high", 0.9))]
    html, page = rendered(runs, tmp_path, target=0.28)
    # Six columns of prices; rounds, smoothed final, two finals, up, down, two times of the ranking; three
    # of work.
    assert html.count('title="Sort by this"') == 17 and ("aria-sort", "ascending") in page.attributes
    # Both reach the target at once, and the final accuracy, the sixth, puts high first.
    places = re.findall(r'data-places="([^"]*)"><th[^>]*><span[^>]*></span>(\w+)<', html)[:2]
    assert [(found.split()[5], name) for found, name in places] == [("1", "low"), ("0", "high")]


def test_the_page_loads_nothing(tmp_path):
    runs = [record(tmp_path / "one", [0.2, 0.8], drop=True), record(tmp_path / "two", [0.3, 0.7], training={"lr": 1})]
    for directories in (runs[:1], runs):
        html, page = rendered(directories, tmp_path)
        assert not {"link", "img", "iframe", "object", "image"} & set(page.tags)
        assert html.count("default-src 'none'") == 1
        # The library once, the numbers, and the page's own script.
        assert page.tags.count("script") == 3 and not any(name == "src" for name, _ in page.attributes)
        own = html.replace(vega_javascript(), "")
        references = [value for name, value in page.attributes if name in ("href", "srcset")]
        ids = [value for name, value in page.attributes if name == "id"]
        assert all(reference.startswith("#") and reference[1:] in ids for reference in references)
        assert len(ids) == len(set(ids))
        assert not re.search(r"https?:|@import|url\(|//[a-z]", own)
        assert len(own) < 100_000 and len(html) < 1_100_000


def test_numbers_that_are_none_are_null(tmp_path):
    html, _ = rendered([record(tmp_path / "run", [0.5, math.nan, math.inf, -math.inf, 0.25])], tmp_path)
    line = charts(html)["chart1-1"]["data"]["values"][0]
    assert line["value"] == [0.5, None, None, None, 0.25]


def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path):
    html, page = rendered([record(tmp_path / "run", [0.5] * 900)], tmp_path)
    rounds = charts(html)["chart1-1"]["data"]["values"][0]["Round"]
    assert len(rounds) == 400 and rounds[0] == 0 and rounds[-1] == 899
    assert mentions(" ".join(page.text), "400 points")


def test_hostile_words_are_shown_as_words(tmp_path):
    evil = '<img src=x onerror="alert(1)">$\\frac{$'
    directory = create_run_directory(tmp_path / "run")
    Description({"name": evil, "seed": 1, evil: {evil: evil}, "method": evil}).write(directory, {evil: evil})
    other = create_run_directory(tmp_path / "other")
    Description({"name": f"_{evil}", "seed": 1}).write(other, {})
    for path in (directory, other):
        with Recorder(path) as recorder:
            clients = [ClientRow(0, evil, 8, 8, 1, 1, 1.0)]
            metrics = [MetricRow(client, name, 0.5) for client in (None, 0) for name in (evil, f"{evil}/accuracy")]
            recorder.round(RoundRow(0, 1, 0, 8, 8, 1.0, 1.0), clients, metrics)
    for directories in ([directory], [directory, other]):
        html, page = rendered(directories, tmp_path)
        assert "img" not in page.tags
        assert not any(name.startswith("on") for name, _ in page.attributes)
        assert "<img" not in html.replace(vega_javascript(), "")
        assert evil in " ".join(page.text)


def test_a_name_cannot_end_a_script(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    runs = [record(tmp_path / name, [0.5], label=f"{evil}{name}", lr=name) for name in "ab"]
    html, page = rendered(runs, tmp_path)
    assert page.tags.count("script") == 3 and evil not in html and "<!--" not in html
    assert evil in str(charts(html)["chart1-1"]["encoding"]["color"]["scale"]["domain"])


def test_the_page_says_where_runs_come_from(tmp_path):
    runs = [record(tmp_path / name, [0.5], lr=name) for name in "ab"]
    _, page = rendered(runs, tmp_path)
    html, page = rendered(runs, tmp_path)
    assert heading(html, "origins") == ""
    (runs[0] / "origin.json").write_text(json.dumps({"command": "rayfl run <b>", "started": "2030-01-02", "host": "h"}))
    _, page = rendered(runs, tmp_path)
    assert page.row("a, seed 1") == ["rayfl run <b>", "2030-01-02", "h", wording.NONE]


def test_a_run_of_unlike_machines_says_that_its_bits_depend_on_them(tmp_path):
    alike, mixed = record(tmp_path / "alike", [0.5]), record(tmp_path / "mixed", [0.5])
    path = mixed / "platform.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mixed": [{"cpu": "another one"}]}))
    for directory, said in ((alike, False), (mixed, True)):
        page = report([directory], tmp_path / f"{directory.name}.html").read_text()
        assert ("different bits" in page and "mixed" in page) == said


def test_an_unfinished_run_is_shown_as_far_as_it_can_be_read(tmp_path):
    cut = record(tmp_path / "cut", [0.2, 0.8, 0.6], finish=False)
    for name in ("rounds", "metrics"):
        stream = cut / "records" / f"{name}.arrows"
        os.truncate(stream, stream.stat().st_size - 40)
    _, page = rendered([cut], tmp_path)
    text = " ".join(page.text)
    line_with(page.text, ["finished", "cut"])
    # A stream ends in a mark of 8 bytes, so the third round's batches were cut, and the second is the last.
    assert "80.0 %" in text
    assert "60.0 %" not in text
    assert summary(read_run(cut))["rounds"] == 2


@pytest.mark.parametrize("values", [[], [math.nan], [math.nan, 0.5]])
def test_a_page_can_be_made_of_little(tmp_path, values):
    _, page = rendered([record(tmp_path / "run", values), record(tmp_path / "two", values, more=1)], tmp_path)
    empty = [text for text in page.text if mentions(text, "No round")]
    assert bool(empty) == (not values)
    _, page = rendered([tmp_path / "run"], tmp_path)
    best = [text for text in page.text if all(mentions(text, fact) for fact in ("best", "50.0 %", "round 1"))]
    assert bool(best) == (len(values) == 2)


def test_refusals(tmp_path):
    with refused(names=["run directory"]):
        report([], tmp_path / "report.html")
    with refused(names=[tmp_path, "experiment.json"]):
        report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
