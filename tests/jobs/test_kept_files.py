"""Files that an experiment names: copied into the run directory, read from there, and from nowhere else again."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rayfl.experiment.experiment import LISTED, read
from rayfl.experiment.identity import kept_files
from rayfl.experiment.sweep import read_sweep
from rayfl.experiment.table import absolute, located, mapped
from rayfl.run_directory.record import read_run
from tests.actors.toys import assert_same_run, logged
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, refused

TRACED = """
rounds = 4
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4, availability = {trace = "who/trace.csv"}}
method = {name = "fedavg", lr = 0.1}
checkpoint = {every = 2}
output = {report = false}
"""
LINKED = """
rounds = 4
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "dpsgd", lr = 0.1}
topology = {name = "file", path = "who/graph.npy"}
checkpoint = {every = 2}
output = {report = false}
"""
TRACE = "client,first_round,last_round\n0,0,9\n1,0,9\n2,1,3\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Experiments in a folder of their own, which is not the current one."""
    folder = tmp_path / "mine"
    (folder / "who").mkdir(parents=True)
    (folder / "traced.toml").write_text(TRACED)
    (folder / "linked.toml").write_text(LINKED)
    (folder / "who" / "trace.csv").write_text(TRACE)
    np.save(folder / "who" / "graph.npy", np.roll(np.eye(4), 1, axis=1))
    monkeypatch.chdir(tmp_path)
    return folder


def run(file: Path, *arguments: object) -> None:
    result = rayfl("run", file, "--inline", *arguments)
    assert result.exit_code == 0, result.output


def spoil(folder: Path) -> None:
    """Another trace, and another graph, where the ones of the experiment were."""
    (folder / "who" / "trace.csv").write_text(TRACE.replace("0,0,9", "3,0,9"))
    np.save(folder / "who" / "graph.npy", 1 - np.eye(4))


@pytest.mark.parametrize("change", [lambda folder: shutil.rmtree(folder / "who"), spoil])
@pytest.mark.parametrize("name", ["traced", "linked"])
def test_what_becomes_of_the_original_does_not_matter_to_a_run_that_is_resumed(
    home: Path, name: str, change, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rayfl")
    file = home / f"{name}.toml"
    run(file, "--rounds", 4, "--output", "long")
    run(file, "--rounds", 2, "--output", "short")
    change(home)
    shutil.move("short", home / "moved")
    result = rayfl("resume", home / "moved", "--rounds", 4)
    assert result.exit_code == 0, result.output
    *_, sentence = logged(caplog)
    check_sentence(sentence, ["checkpoint", "round 2"])
    assert_same_run(Path("long"), home / "moved")


@pytest.mark.parametrize("name", ["traced", "linked"])
def test_a_run_directory_says_by_itself_how_it_is_run_again(home: Path, name: str) -> None:
    run(home / f"{name}.toml", "--output", "first")
    shutil.rmtree(home)
    run(Path("first/experiment.toml"), "--output", "second")
    # Also over itself: the files are read before they make way.
    run(Path("first/experiment.toml"), "--output", "first", "--overwrite")
    assert read_run(Path("first")).experiment == read_run(Path("second")).experiment
    assert_same_run(Path("first"), Path("second"))


def test_a_copy_is_called_by_its_content_and_settings_differ_where_contents_do(home: Path) -> None:
    first = kept_files(read(home / "traced.toml").as_dict())
    (home / "who" / "trace.csv").rename(home / "who" / "other.csv")
    again = kept_files(read(home / "traced.toml", [f"clients.availability.trace={home}/who/other.csv"]).as_dict())
    assert first == again and list(first.contents.values()) == [TRACE.encode()]
    (home / "who" / "trace.csv").write_text(TRACE + "3,0,1\n")
    assert kept_files(read(home / "traced.toml").as_dict()).table != first.table


def test_a_file_changes_nothing_in_the_run_that_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(home / "traced.toml", "--output", "calm")

    def meddling(*_: object) -> str:
        spoil(home)
        return ""

    monkeypatch.setattr("jobs.console.line", meddling)
    run(home / "traced.toml", "--output", "disturbed")
    assert read_run(Path("disturbed")).finished
    assert_same_run(Path("calm"), Path("disturbed"))


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (Path.unlink, ["does not exist", "clients.availability.trace=FILE"]),
        (lambda path: path.write_text(TRACE + "3,0,1\n"), ["/short", "files/trace-"]),
    ],
)
def test_a_copy_that_is_damaged_is_missed_and_can_be_given_again(home: Path, damage, facts: list[str]) -> None:
    run(home / "traced.toml", "--output", "long")
    run(home / "traced.toml", "--rounds", 2, "--output", "short")
    (copy,) = Path("short/files").iterdir()
    damage(copy)
    result = rayfl("resume", "short", "--rounds", 4)
    refused(result, names=[copy.name, *facts])
    result = rayfl("resume", "short", "--rounds", 4, "clients.availability.trace=mine/who/trace.csv")
    assert result.exit_code == 0, result.output
    assert_same_run(Path("long"), Path("short"))


def test_paths_are_relative_to_their_file_and_those_of_the_command_to_where_it_is_given(home: Path) -> None:
    file = home / "traced.toml"
    assert read(file).as_dict()["clients"]["availability"]["trace"] == str(home / "who/trace.csv")
    Path("trace.csv").write_text(TRACE)
    given = read(file, ["clients.availability.trace=trace.csv"])
    assert given.as_dict()["clients"]["availability"]["trace"] == "trace.csv"
    assert absolute(given.as_dict())["clients"]["availability"]["trace"] == str(Path.cwd() / "trace.csv")
    file.write_text(TRACED + '[sweep]\nclients.availability.trace = ["who/trace.csv", "/elsewhere.csv"]\n')
    found = read_sweep(file)
    assert found is not None
    traces = [one.experiment.as_dict()["clients"]["availability"]["trace"] for one in found]
    assert traces == [str(home / "who/trace.csv"), "/elsewhere.csv"]


def test_only_what_names_a_file_is_taken_for_a_path() -> None:
    table = {
        "name": "trace",
        "topology": {"name": "ring"},
        "clients": {"availability": {"probability": [0.5, 1.0]}},
        "sweep": {"topology": [{"name": "file", "path": "a.csv"}, "ring"], "topology.path": ["b.npy"], "path": ["c"]},
    }
    moved = located(table, Path("/home"))
    assert moved["sweep"] == {
        "topology": [{"name": "file", "path": "/home/a.csv"}, "ring"],
        "topology.path": ["/home/b.npy"],
        "path": ["c"],
    }
    assert {**moved, "sweep": 0} == {**table, "sweep": 0}
    assert mapped({"topology": {"path": ""}}, lambda key, path: "changed") == {"topology": {"path": ""}}
    with refused(names=["/nowhere", "topology.path="]):
        kept_files({"topology": {"path": "/nowhere"}})


@pytest.mark.parametrize("key", [*LISTED])
def test_a_file_may_be_named_wherever_something_is_chosen(key: str) -> None:
    for value in ("mine.py:Mine", {"name": "mine.py:Mine"}, ["mine.py:Mine"]):
        assert "/home/mine.py:Mine" in str(located({key: value}, Path("/home")))
