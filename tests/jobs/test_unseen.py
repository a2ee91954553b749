"""Clients that no round asks, everywhere a run is shown: progress, tables, list, comparison, JSON and page."""

import json
from pathlib import Path

import pytest

from rayfl.population.sampling import Clients
from rayfl.report.series import series
from rayfl.run_directory.record import read_run
from tests.jobs.commands import rayfl
from tests.refusals import line_with


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings = ["--inline", "rounds=2", "clients.count=10", "evaluation.every=1"]
    for name, more in (("seen", []), ("some", ["method=fedavg_ft", "clients.unseen=0.3"])):
        result = rayfl("run", "demo", *settings, *more, "--output", folder / name)
        assert result.exit_code == 0, result.output
        (folder / f"{name}.txt").write_text(result.output)
    return folder


def final(run: Path, name: str) -> float:
    found = series(read_run(run), name)
    assert found is not None
    return found.final


def shown(text: str, accuracy: float) -> bool:
    return f"{100 * accuracy:.1f} %" in text


def test_progress_table_json_list_and_comparison(runs: Path):
    accuracy = final(runs / "some", "unseen/accuracy")
    text = (runs / "some.txt").read_text()
    names = ["2/2 rounds", "pooled/accuracy", "own/accuracy", f"unseen/accuracy {accuracy:.4f}", "delivered 7/7"]
    line_with(text, names)
    line_with(text, ["final unseen/accuracy", f"{100 * accuracy:.2f} %"])
    line_with(text, ["final unseen_before_adapting/accuracy"])
    (numbers,) = json.loads(rayfl("report", "--json", runs / "some").output)
    assert numbers["final"]["unseen/accuracy"] == accuracy
    listed = rayfl("ls", runs).output
    assert "unseen" in line_with(listed, ["pooled", "own", "changed"]) and shown(line_with(listed, ["some"]), accuracy)
    compared = rayfl("compare", runs / "seen", runs / "some", "--metric", "own/accuracy").output
    assert "Unseen" in compared and shown(compared, accuracy)
    ranked = rayfl("compare", runs / "seen", runs / "some", "--metric", "unseen/accuracy", "--target", "0.01").output
    line_with(ranked, ["2 runs", "unseen/accuracy"])


def test_the_page_names_unseen_clients(runs: Path):
    page = (runs / "some" / "report.html").read_text()
    assert "7 clients trained" in page and "Unseen clients, own test data" in page


def test_the_table_of_the_data_marks_them(runs: Path):
    result = rayfl("data", "demo", "clients.count=10", "clients.unseen=0.3")
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    numbers = Clients(count=10, unseen=0.3).unseen_numbers(1)
    marked = [f"{7 + place} unseen ({number} in the partition)" for place, number in enumerate(numbers)]
    assert [row for row in rows if row] == [*map(str, range(7)), *marked, "all"]


def test_a_method_says_what_a_new_client_does():
    words = {
        "fedavg": "takes the global model before",
        "perfedavg": "adapts it",
        "ditto": "local work of one round",
        "local": "no model for an unseen client",
    }
    for name, part in words.items():
        assert part in " ".join(rayfl("methods", name).output.split())
