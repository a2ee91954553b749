"""`rayfl run FILE --output DIR --resume`: one command that begins a run, goes on with it, or says it is finished."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest

from jobs.console import Audience
from jobs.single import _prepared
from rayfl import toml
from rayfl.experiment.experiment import read
from rayfl.run_directory import disk
from rayfl.run_directory.record import Recorder, read_run
from tests.actors.toys import assert_same_run, experiment
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

CHANGES = {"runtime": {"executor": "inline"}, "output": {"report": False}, "checkpoint": {"every": 1}}


class Killed(BaseException):
    """Stands for a kill: no `except Exception` sees it."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "experiment.toml"
    path.write_text(toml.dumps(experiment("fedpse", rounds=3, **CHANGES).as_dict()))
    return path


@pytest.fixture
def undisturbed(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, because `assert_same_run` writes into what it compares."""
    return shutil.copytree(finished, tmp_path / "undisturbed")


@pytest.fixture(scope="module")
def finished(file: Path) -> Path:
    directory = file.parent / "run"
    result = rayfl("run", file, "--output", directory, "--resume")
    assert result.exit_code == 0 and read_run(directory).finished, result.output
    return directory


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_finished_run_stays_as_it_is_and_is_a_success(file: Path, finished: Path):
    before = contents(finished)
    result = rayfl("run", file, "--output", finished, "--resume")
    assert result.exit_code == 0
    line_with(result.output, [finished, "finished"])
    assert contents(finished) == before


def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    file: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory, whole = tmp_path / "run", Recorder.round

    def killed(self: Recorder, row, clients, metrics):
        if row.round == 2:
            raise Killed
        whole(self, row, clients, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "round", killed)
        with pytest.raises(Killed):
            rayfl("run", file, "--output", directory, "--resume")
    assert len(read_run(directory).rounds) == 2 and not read_run(directory).finished
    result = rayfl("run", file, "--output", directory, "--resume")
    assert result.exit_code == 0, result.output
    assert_same_run(directory, undisturbed)


@pytest.mark.parametrize("again", [["--resume"], ["--overwrite"], []])
def test_a_kill_before_the_experiment_was_written_does_not_stop_the_next_try(
    file: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[str]
):
    directory = tmp_path / "run"

    def killed(*_: object):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_directory", killed)
        with pytest.raises(Killed):
            rayfl("run", file, "--output", directory)
    assert (directory / "platform.json").exists() and not (directory / "experiment.json").exists()
    assert rayfl("run", file, "--output", directory, *again).exit_code == 0
    assert_same_run(directory, undisturbed)


@pytest.mark.parametrize("mine", ["experiment.toml", "tensorboard/events.out.tfevents.1", "report.html"])
def test_files_of_yours_with_names_of_a_run_are_not_what_a_killed_run_left(file: Path, tmp_path: Path, mine: str):
    path = tmp_path / "project" / mine
    path.parent.mkdir(parents=True)
    shutil.copy(file, path)
    before = contents(tmp_path)
    refused(rayfl("run", path, "--output", tmp_path / "project", "--resume"), names=[Path(mine).parts[0]])
    assert contents(tmp_path) == before


def test_a_page_that_a_kill_prevented_is_drawn(file: Path, finished: Path, tmp_path: Path, undrawn: None):
    directory = shutil.copytree(finished, tmp_path / "run")
    result = rayfl("run", file, "output.report=true", "--output", directory, "--resume")
    assert result.exit_code == 0, result.output
    assert (directory / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["method.lr=0.5"], ["finished", "method.lr=0.1", "0.5", "--output"]),
        (["--rounds", "5"], ["finished", "rounds=3", "5", "--output"]),
        (["seed=7"], ["seed=1", "7", "--output"]),
        (["--overwrite"], ["--resume", "--overwrite"]),
    ],
)
def test_other_settings_are_refused_and_nothing_is_lost(
    arguments: list[str], names: list[str], file: Path, finished: Path
):
    before = contents(finished)
    refused(rayfl("run", file, *arguments, "--output", finished, "--resume"), names=names)
    assert contents(finished) == before


def test_it_needs_a_directory(file: Path):
    refused(rayfl("run", file, "--resume"), names=["--resume", "--output"])


def test_what_no_run_wrote_and_a_damaged_run_are_refused(file: Path, finished: Path, tmp_path: Path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    refused(rayfl("run", file, "--output", mine, "--resume"), names=["thesis.txt"])
    damaged = shutil.copytree(finished, tmp_path / "damaged")
    (damaged / "experiment.json").unlink()
    before = contents(damaged)
    refused(rayfl("run", file, "--output", damaged, "--resume"), names=[damaged, "experiment.json", "another"])
    assert contents(damaged) == before


def test_a_sweep_goes_on_where_it_was(file: Path, tmp_path: Path, undrawn: None):
    sweep = [file, "sweep.seed=[1, 2]", "rounds=1", "--output", tmp_path / "sweep"]
    for _ in range(2):
        result = rayfl("run", *sweep, "--resume")
        assert result.exit_code == 0, result.output
    assert result.output.count("skipped") == 2


def test_a_task_that_follows_from_the_data_is_recorded_and_may_be_written(file: Path, finished: Path, tmp_path: Path):
    recorded = read_run(finished)
    assert recorded.experiment["task"] == {"name": "classification"}
    written = [file, "task=classification", "--resume"]
    assert rayfl("run", *written, "--output", finished).exit_code == 0
    # Earlier runs have recorded no task.
    old = shutil.copytree(finished, tmp_path / "old")
    (old / "experiment.json").write_text(json.dumps({**recorded.experiment, "task": None}))
    assert rayfl("run", *written, "--output", old).exit_code == 0
    result = rayfl("run", file, "task=regression", "--resume", "--output", finished)
    assert result.exit_code == 2
    line_with(result.output, ["task.name", "classification", "regression"])


def test_a_run_with_its_task_written_has_the_identity_of_one_without(file: Path):
    implied, written = (_prepared(read(file, task), Audience()) for task in ([], ["task=classification"]))
    assert implied.setup.identity == written.setup.identity and implied.description == written.description


def test_what_is_handed_over_is_kept_by_nobody_else(file: Path):
    prepared = _prepared(read(file), Audience())
    setup = prepared.hand_over()
    alive = weakref.ref(setup)
    del setup
    gc.collect()
    assert alive() is None
