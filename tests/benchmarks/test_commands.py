"""`python -m benchmarks NAME`: how a bench is called, the table and the JSON file of its figures."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import rounds
from benchmarks.__main__ import main
from benchmarks.figures import Column, Figures, Results
from benchmarks.rounds import Measured
from tests.benchmarks.commands import benchmark
from tests.refusals import refused


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def some() -> Figures:
    """Two rows."""
    columns = (Column("name", "name"), Column("size", "size, kB", lambda size: f"{size / 1e3:.1f}"), Column("raw"))
    figures = Figures("rows", columns, title="sizes")
    figures.add("a", 1234, [1, 2])
    figures.add("b", None, [], bold=True)
    return figures


def test_the_terminal_shows_rounded_cells_and_the_file_has_the_numbers(here: Path, capsys: pytest.CaptureFixture[str]):
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=80).print(some().table())
    shown = stream.getvalue()
    assert "1.2" in shown and "1234" not in shown and "[1, 2]" not in shown and "None" not in shown
    assert "\x1b[1mb   " in shown and "\x1b[1ma   " not in shown
    Results("start", Path("found.json")).write(some(), seconds=1.5)
    assert capsys.readouterr().out == "figures: found.json\n"
    assert json.loads(Path("found.json").read_text()) == {
        "written_by": "python -m benchmarks start",
        "seconds": 1.5,
        "rows": [{"name": "a", "size": 1234, "raw": [1, 2]}, {"name": "b", "size": None, "raw": []}],
    }


def test_a_file_of_another_bench_is_kept(here: Path):
    path = Path("found.json")
    Results("scale", path).write(some())
    Results("scale", path).require()
    with refused(names=["found.json", "`python -m benchmarks start`", "--overwrite"]):
        Results("start", path).require()
    Results("start", path, overwrite=True).require()
    with refused(names=["--json nowhere/found.json", "directory nowhere"]):
        Results("start", Path("nowhere/found.json")).require()


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_bench_refuses_a_file_that_is_not_its_own(name: str, here: Path):
    Path("mine.json").write_text("mine")
    refused(benchmark(name, "--json", "mine.json"), names=["mine.json", f"`python -m benchmarks {name}`"])
    assert Path("mine.json").read_text() == "mine" and len(list(here.iterdir())) == 1


def test_the_bench_knows_its_workloads_and_replaces_only_its_plot(tmp_path):
    refused(benchmark("rounds", "W9"), names=["W9"])
    refused(benchmark("exchange", "--peers", 10**9), names=["--peers 1000000000", "--entries 11000000", "88.0 PB"])
    refused(benchmark("compressors", "--entries", 10**15), names=["--entries 1000000000000000", "12.0 PB"])
    (tmp_path / "mine.svg").write_text("mine")
    result = benchmark("compressors", "--entries", 100, "--plot", tmp_path / "mine.svg")
    refused(result, names=["mine.svg"])


def test_the_best_bare_loop_is_bold_and_every_program_is_compared():
    figures = Figures("rounds", rounds.COLUMNS)
    bare = {"one": Measured((2.0, 4.0, 3.0), "2.13", 10**9), "two": Measured((2.0, 1.0, 2.5), "2.13", 2 * 10**9)}
    others = {"BlazeFL": Measured((1.2,), "2.0.3", 10**9)}
    rounds.add_rows(figures, "W1", bare, others, Measured((2.4, 0.1, 9.9), "0.1", 3 * 10**9))
    assert [(row["program"], row["median_s"], row["ratio"], row["version"]) for row in figures.rows] == [
        ("one", 3.0, 2.4 / 3.0, "2.13"),
        ("two", 2.0, 1.2, "2.13"),
        ("BlazeFL", 1.2, 2.0, "2.0.3"),
        ("rayfl", 2.4, 1.0, "0.1"),
    ]
    styles = [str(row.style) for row in figures.table().rows]
    assert [style == "bold" for style in styles] == [False, True, False, False]
