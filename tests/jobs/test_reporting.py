"""`rayfl ls`, `show` and `compare`: runs on disk as tables, read without torch and without changing anything."""

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from jobs.reporting import parts, rich_table
from rayfl.errors import printable
from rayfl.metrics.facts import Facts
from rayfl.report.results import RunResults, load
from rayfl.report.summary import TextTable
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description, write_metric_facts
from rayfl.run_directory.disk import locked
from rayfl.run_directory.record import Recorder
from rayfl.run_directory.run_folder import create_run_directory
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, refused


def recorded(
    name: str, accuracy: float, *, seed: int = 1, lr: float = 0.1, cut: bool = False, own: bool = False
) -> Path:
    """Two of two rounds, or of three where the run is cut: 8 Mbit up and 16 down a round."""
    directory = Path(name)
    experiment = {"name": "same", "seed": seed, "rounds": 3 if cut else 2, "method": {"name": "fedavg", "lr": lr}}
    Description(experiment).write(create_run_directory(directory), {"torch": "2.13", "variables": {"A": "b"}})
    recorder = Recorder(directory)
    for round in range(2):
        row = RoundRow(round, 1, 1, 8_000_000, 16_000_000, 1.0, 1.0)
        metrics = [MetricRow(None, "own/accuracy", accuracy / 2)] if own else []
        recorder.round(row, [], [*metrics, MetricRow(None, "pooled/accuracy", accuracy + 0.1 * round)])
    recorder.stop() if cut else recorder.close()
    return directory


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells(output: str) -> list[list[str]]:
    """The rows of the tables that were printed, without their frames; wrapped cells are not joined."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line[:1] == "│"]


def test_ls_shows_what_became_of_each_run(here):
    recorded("runs/done", 0.5, own=True)
    recorded("runs/sweep/cut", 0.3, cut=True)
    recorded("runs/sweep/busy", 0.2, cut=True)
    recorded("runs/broken", 0.2)
    Path("runs/broken/experiment.json").write_text("{")
    Path("runs/notes.txt").write_text("mine")
    before = sorted(path for path in here.rglob("*"))
    with locked(Path("runs/sweep/busy")):
        result = rayfl("ls")
    assert result.exit_code == 0, result.output
    line_with(result.output, ["4 runs", here / "runs"])
    assert sorted(row[:5] for row in cells(result.output)) == [
        ["broken", "damaged", "0/?", "", ""],
        ["done", "finished", "2/2", "60.0 %", "25.0 %"],
        ["sweep/busy", "running", "2/3", "30.0 %", ""],
        ["sweep/cut", "stopped", "2/3", "40.0 %", ""],
    ]
    assert sorted(path for path in here.rglob("*")) == before
    assert [row[0] for row in cells(rayfl("ls", "runs/sweep/cut").output)] == ["cut"]
    refused(rayfl("ls", "nowhere"), names=[f"{here}/nowhere"])


def test_show_says_settings_results_and_how_to_go_on(here):
    recorded("run", 0.5)
    shown = rayfl("show", "run")
    assert shown.exit_code == 0
    for words in (
        "[method]",
        "lr = 0.1",
        "# torch: 2.13",
        "60.00 %",
        "2.000 MB",
    ):
        assert words in shown.output
    for facts in (["finished", "2 of 2"], ["same", "2 rounds", "0 to 1"], [f"rayfl report {here}/run"]):
        line_with(shown.output, facts)
    assert "variables" not in shown.output
    recorded("cut", 0.5, cut=True)
    shown = rayfl("show", "cut")
    for facts in (["stopped", "2 of 3"], [f"rayfl resume {here}/cut"]):
        line_with(shown.output, facts)
    refused(rayfl("show", "nowhere"), names=["nowhere", "experiment.json"])


def test_compare_ranks_takes_seeds_together_and_shows_what_differs():
    recorded("a", 0.5)
    recorded("b", 0.6, seed=2)
    recorded("c", 0.7, lr=0.3)
    result = rayfl("compare", "a", "b", "c", "--last", 1, "--target", 0.65)
    assert result.exit_code == 0, result.output
    best, second, differing = cells(result.output)
    work = ["0", "0", "0"]
    assert best == ["same (lr=0.3)", "1", "2", *work, "80.0 % (1)", "1 (1)", "3.00 (1)", "2.00 MB", "4.00 MB", "2.0 s"]
    assert second[:7] == ["same (lr=0.1)", "1, 2", "2", *work, "65.0 \u00b1 7.1 % (2)"]
    assert differing == ["method.lr", "0.3", "0.1"]
    line_with(result.output, ["3 runs", "pooled/accuracy"])
    refused(rayfl("compare", "a", "b", "--metric", "own/accuracy"), names=["own/accuracy", "pooled/accuracy"])
    (only,) = cells(rayfl("compare", "a", "c", "--best-over", "method.lr").output)
    assert only[0].startswith("same") and only[5] == "75.0 %"


def test_a_table_wider_than_a_line_is_printed_in_parts_that_keep_the_labels():
    label, heads = "a label of thirty-two letters or so", [f"Number {place}" for place in range(14)]
    whole = TextTable(["Run", *heads], [[label, *["65.0 \u00b1 7.1 % (2)"] * 14]])
    found = parts(whole, 150)
    assert len(found) == 3 and [head for part in found for head in part.heads[1:]] == heads
    assert all(part.heads[0] == "Run" and part.rows[0][0] == label for part in found)
    for part in found:
        text = StringIO()
        Console(file=text, width=150).print(rich_table(part))
        assert text.getvalue().count(label) == 1
    (narrow,) = parts(TextTable(["Run", "Rounds"], []), 150)
    assert narrow.heads == ("Run", "Rounds") and not narrow.rows


def evaluated(name: str, method: str, pooled: float, own: float | None, seed: int = 1) -> Path:
    """A run of one round that was evaluated on the pooled test set and, unless `own` is None, on clients' own."""
    directory = Path(name)
    experiment = {"name": method, "seed": seed, "rounds": 1, "method": {"name": method}}
    Description(experiment).write(create_run_directory(directory), {})
    metrics = [MetricRow(None, "pooled/accuracy", pooled)]
    metrics += [] if own is None else [MetricRow(client, "own/accuracy", own) for client in (0, 1)]
    with Recorder(directory) as recorder:
        recorder.round(RoundRow(0, 1, 1, 8_000_000, 8_000_000, 1.0, 1.0), [], metrics)
    return directory


def ranked(*names: str) -> tuple[str, list[str]]:
    """The accuracy by which `rayfl compare` ranks runs, and its list of them, which is that of the page."""
    result = rayfl("compare", *names)
    assert result.exit_code == 0, result.output
    rows = [row[0] for row in cells(result.output) if row[0] in ("fedavg", "ditto", "mine", "fedprox")]
    # The second table says how evenly they lie over clients, in the same order.
    labels = list(dict.fromkeys(rows))
    assert [rows[place] for place in range(len(labels))] == labels
    assert rayfl("report", *names, "--output", "page.html", "--overwrite").exit_code == 0
    page = Path("page.html").read_text().partition('id="runs"')[2]
    assert sorted(labels, key=lambda label: page.index(f">{label}<".replace(">", "</span>", 1))) == labels
    title = result.output.splitlines()[0]
    check_sentence(title.strip(), [f"{len(names)} runs"])
    (metric,) = re.findall(r"\w+/accuracy", title)
    return metric, labels


def test_how_evenly_clients_fare_stands_in_compare_and_show():
    names = ("own/recall", "own/recall/3")
    metrics = [MetricRow(client, name, 0.25 + 0.5 * client) for name in names for client in (0, 1)]
    Description({"name": "b", "seed": 1, "rounds": 1, "method": "fedavg"}).write(create_run_directory(Path("b")), {})
    with Recorder(Path("b")) as recorder:
        recall = Facts(title="Recall", unit="%", low=0.0, high=1.0, higher_is_better=True, ranks=True)
        write_metric_facts(Path("b"), {"recall": recall, "recall/3": recall.model_copy(update={"title": "Recall: 3"})})
        recorder.round(RoundRow(0, 1, 1, 8, 8, 1.0, 1.0), [], metrics)
    result = rayfl("compare", "b")
    assert result.exit_code == 0, result.output
    spread = ["50.0 %", "25.0 %", "25.0 %", "25.0 %", "75.0 %", "50.0 %", "0.800"]
    assert [row[1:] for row in cells(result.output) if row[0].startswith("Recall")] == [spread]
    shown = [row for row in cells(rayfl("show", "b").output) if row[0].startswith("Recall")]
    assert [row[1:] for row in shown] == [spread, spread] and "Recall: 3" in shown[1][0]
    found = load("b")
    assert isinstance(found, RunResults)
    assert tuple(found.fairness.index) == names and found.fairness["worst"].tolist() == [0.25, 0.25]
    (numbers,) = json.loads(rayfl("report", "b", "--json").output)
    assert numbers["fairness"]["own/recall/3"]["best"] == 0.75
    by = rayfl("compare", "b", "--metric", "own/recall/3").output.splitlines()[0]
    check_sentence(by.strip(), ["own/recall/3"])


def test_clients_own_test_data_decide_where_a_method_is_personal():
    evaluated("a", "fedavg", 0.81, 0.82)
    evaluated("b", "fedprox", 0.82, 0.81)
    assert ranked("a", "b") == ("pooled/accuracy", ["fedprox", "fedavg"])
    evaluated("c", "ditto", 0.80, 0.96)
    assert ranked("a", "b", "c") == ("own/accuracy", ["ditto", "fedavg", "fedprox"])
    # Without the values for most of the runs it cannot decide.
    evaluated("d", "fedavg", 0.7, None)
    assert ranked("d", "c")[0] == "pooled/accuracy"
    # A method of somebody's own is personal where the run has saved personal models.
    mine = evaluated("e", "mine", 0.79, 0.97)
    assert ranked("a", "e") == ("pooled/accuracy", ["fedavg", "mine"])
    (mine / "models").mkdir()
    (mine / "models/personal.safetensors").touch()
    assert ranked("a", "e") == ("own/accuracy", ["mine", "fedavg"])
    check_sentence(rayfl("compare", "c").output.splitlines()[0].strip(), ["1 run", "own/accuracy"])


def test_equal_runs_come_in_one_order_whatever_the_order_in_which_they_are_named():
    for seed, accuracy in ((1, 0.1), (2, 0.2), (3, 0.7)):
        for method in ("fedprox", "fedavg"):
            evaluated(f"{method}{seed}", method, accuracy, None, seed)
    forth = [f"{method}{seed}" for seed in (1, 2, 3) for method in ("fedprox", "fedavg")]
    assert ranked(*forth)[1] == ranked(*forth[::-1])[1] == ["fedavg", "fedprox"]


def test_nothing_of_torch_or_ray_is_loaded_for_a_table_or_a_mistake():
    code = (
        "import sys, jobs.cli, jobs.failures, jobs.shipped_experiments, jobs.reporting, rayfl.report.summary; "
        "sys.exit(len({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m[/red][bold]b\u202e"
"""A name that would rename a terminal's window, clear it, and end in an error of rich's markup."""


@pytest.mark.parametrize("command", ["ls", "show", "compare", "report", "resume"])
def test_no_name_of_somebody_elses_run_commands_the_terminal(command: str, here: Path):
    parent = here / HOSTILE.replace("/", "")
    parent.mkdir()
    for number in range(2):
        directory = parent / f"{number}{HOSTILE.replace('/', '')}"
        table = {"name": HOSTILE, "label": HOSTILE, "seed": 1, "rounds": 2, "method": {"name": HOSTILE, "lr": number}}
        Description(table).write(create_run_directory(directory), {"torch": HOSTILE, HOSTILE: HOSTILE})
        recorder = Recorder(directory)
        for round in range(2):
            metrics = [MetricRow(None, "pooled/accuracy", 0.5), MetricRow(None, f"{HOSTILE}/accuracy", 0.5)]
            recorder.round(RoundRow(round, 1, 1, 8, 16, 1.0, 1.0), [], metrics)
        recorder.close()
    result = rayfl(command, directory if command in ("show", "resume") else parent)
    assert result.exit_code == (2 if command == "resume" else 0), result.output
    assert result.output and printable(result.output) == result.output
    assert "\\x1b" in result.output
