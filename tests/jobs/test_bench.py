"""`rayfl bench NAME`: how a bench is called, the table and the JSON file of its figures, and the older spellings."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jobs.bench import rounds
from jobs.bench.commands import bench
from jobs.bench.figures import Column, Figures, Results
from jobs.bench.rounds import Measured
from rayfl.errors import RayflError
from tests.jobs.commands import rayfl, refused


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
        "written_by": "rayfl bench start",
        "seconds": 1.5,
        "rows": [{"name": "a", "size": 1234, "raw": [1, 2]}, {"name": "b", "size": None, "raw": []}],
    }


def test_a_file_of_another_bench_is_kept(here: Path):
    path = Path("found.json")
    Results("scale", path).write(some())
    Results("scale", path).require()
    with pytest.raises(RayflError, match="is not a file of `rayfl bench start` that rayfl wrote"):
        Results("start", path).require()
    Results("start", path, overwrite=True).require()
    with pytest.raises(RayflError, match="there is no directory nowhere"):
        Results("start", Path("nowhere/found.json")).require()


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (["W1", "W3"], "write: rayfl bench rounds W1 W3"),
        (["--scale"], "write: rayfl bench scale"),
        (["--chaos", "fedavg", "--kills", "20"], "write: rayfl bench chaos fedavg --kills 20"),
        (["fedavg", "--chaos"], "write: rayfl bench chaos fedavg"),
        (["--exchange", "--peers", "50"], "write: rayfl bench exchange --peers 50"),
        (["--peers", "50", "--exchange"], "write: rayfl bench exchange --peers 50"),
        (["--compressors", "--plot", "a b.svg"], "write: rayfl bench compressors --plot 'a b.svg'"),
        (["--kills", "20"], "write: rayfl bench NAME, where NAME is one of chaos"),
        (["rouns"], "write: rayfl bench NAME, where NAME is one of rounds, compressors"),
    ],
)
def test_an_older_spelling_is_refused_and_the_new_one_named(former: list[str], now: str, here: Path):
    refused(rayfl("bench", *former), now)
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", sorted(bench.commands))
def test_no_bench_takes_the_options_of_another(name: str, here: Path):
    own = {option for each in bench.commands[name].params for option in each.opts}
    others = {
        option
        for other in bench.commands.values()
        for each in other.params
        for option in each.opts
        if option.startswith("--")
    }
    assert {"--json", "--overwrite"} <= own and others - own
    for option in others - own:
        refused(rayfl("bench", name, option, "1"), f"rayfl bench {name}: there is no option {option}, which is one of ")


@pytest.mark.parametrize("name", sorted(bench.commands))
def test_every_bench_refuses_a_file_that_is_not_its_own(name: str, here: Path):
    Path("mine.json").write_text("mine")
    refused(rayfl("bench", name, "--json", "mine.json"), "mine.json is there already", f"`rayfl bench {name}`")
    assert Path("mine.json").read_text() == "mine" and len(list(here.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["exchange", "nonsense"], "(nonsense)"), (["scale", "W1"], "(W1)"), (["chaos", "--seed", "x"], "'x'")],
)
def test_what_a_bench_does_not_take_is_refused(arguments: list[str], words: str, here: Path):
    refused(rayfl("bench", *arguments), words, f"see rayfl bench {arguments[0]} --help")


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
