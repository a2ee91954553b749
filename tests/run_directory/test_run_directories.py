"""A run directory is made, used again and refused: nothing that no run wrote is lost, and no link is followed."""

import errno
import os
from pathlib import Path

import pytest
import torch

from rayfl.errors import RayflError
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.disk import locked, write_text
from rayfl.run_directory.record import Recorder, read_run
from rayfl.run_directory.run_files import require_no_links
from rayfl.run_directory.run_folder import RunFolder, create_run_directory
from rayfl.run_directory.saved_models import save_model
from tests.refusals import refused
from tests.run_directory.test_record import described, going_on, record_round


def test_a_run_directory_is_reused_only_when_asked_and_only_a_run(tmp_path):
    directory = described(tmp_path / "run")
    save_model(directory, "global", [{"w": torch.ones(1)}])
    with refused(names=[directory, "--overwrite"]):
        create_run_directory(directory)
    assert (directory / "models" / "global.safetensors").exists()
    # Left by a kill while the report was written.
    (directory / "report.html.partial").write_text("<html>")
    assert create_run_directory(directory, overwrite=True) == directory
    assert list(directory.iterdir()) == [directory / "lock"]
    assert create_run_directory(directory) == directory

    (directory / "thesis.tex").write_text("years of work")
    with refused(names=[directory, "thesis.tex"]):
        create_run_directory(directory, overwrite=True)
    (directory / "experiment.json").write_text("{}")
    with refused(names=[directory / "thesis.tex"]):
        create_run_directory(directory, overwrite=True)
    assert (directory / "thesis.tex").read_text() == "years of work"
    with refused(names=[directory / "thesis.tex", "file", "directory"]):
        create_run_directory(directory / "thesis.tex")


@pytest.mark.parametrize(
    "name",
    [
        "models/mine.safetensors",
        "models/notes/thesis.tex",
        "records/rounds.csv",
        "checkpoints/readme",
        "checkpoints/00000002/states-0000.npy",
        "files/trace.csv",
        "tensorboard/mine",
        "experiment.json.bak",
        "report.html/mine",
    ],
)
def test_a_file_that_no_run_wrote_keeps_a_run_from_being_overwritten(tmp_path, name):
    directory = described(tmp_path / "run")
    save_model(directory, "global", [{"w": torch.ones(1)}])
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = sorted(directory.rglob("*"))
    with refused(names=[path]):
        create_run_directory(directory, overwrite=True)
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("name", ["models", "checkpoints", "records/clients.arrows", "lock"])
def test_a_link_in_a_run_directory_is_not_followed(tmp_path, name):
    directory, elsewhere = described(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "global.safetensors").write_text("mine")
    (directory / "records").mkdir()
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(elsewhere)
    with refused(names=[directory / name, "link"]):
        create_run_directory(directory, overwrite=True)
    with refused(names=[directory / name, "link"]):
        require_no_links(directory)
    assert [path.name for path in elsewhere.iterdir()] == ["global.safetensors"]
    assert (directory / "experiment.json").is_file()


def test_a_lock_or_a_partial_file_that_is_a_link_leads_nowhere(tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError) as raised, locked(tmp_path):
        pass
    assert raised.value.errno == errno.ELOOP
    (tmp_path / "page.partial").symlink_to(target)
    write_text(tmp_path / "page", "page")
    assert target.read_text() == "mine" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("there", [[], ["runs"], ["runs", "runs/one"]])
def test_nothing_is_left_of_a_run_that_is_refused(tmp_path, there):
    for name in there:
        (tmp_path / name).mkdir()
    directory = tmp_path / "runs" / "one"
    folder = RunFolder(directory, "runs")
    with pytest.raises(RayflError, match="refused"), folder.made():
        Description({}).write(directory, {})
        with Recorder(directory):
            raise RayflError("refused")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    with (
        pytest.raises(OSError) as raised,
        RunFolder(tmp_path / "runs" / "two" / ("x" * 300), "runs").made(),
    ):
        pass
    assert raised.value.errno == errno.ENAMETOOLONG
    with pytest.raises(RayflError, match="late"), folder.made():
        Description({}).write(directory, {})
        with Recorder(directory) as recorder:
            record_round(recorder, 0)
            raise RayflError("late")
    assert len(read_run(tmp_path / "runs" / "one").rounds) == 1


@pytest.mark.parametrize(
    "name", ["experiment.json", "platform.json", "records/rounds.arrows", "records/clients.parquet"]
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    directory = described(tmp_path / "run")
    (directory / "records").mkdir()
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with refused(names=[directory, "experiment.json"] if name == "experiment.json" else [directory / name, "pipe"]):
        read_run(directory)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("[" * 100_000, "nested"),
        ('{"a":' * 80 + "1" + "}" * 80, "nested"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ("[1]", "table"),
        ("{", "line 1"),
    ],
)
def test_json_of_a_stranger_ends_in_a_sentence(tmp_path, text, fact):
    directory = described(tmp_path / "run")
    (directory / "experiment.json").write_text(text)
    with refused(names=[directory / "experiment.json", fact]):
        read_run(directory)


def test_a_run_that_goes_on_is_not_overwritten(tmp_path):
    directory = described(tmp_path / "run")
    with Recorder(directory) as recorder:
        with refused(names=[directory, "wait"]):
            create_run_directory(directory, overwrite=True)
        recorder.round(RoundRow(0, 1, 1, 8, 8, 1.0, 0.1), [], [])
    assert read_run(directory).finished and len(read_run(directory).rounds) == 1
    assert create_run_directory(directory, overwrite=True) == directory


def test_a_directory_that_is_no_run_or_cannot_be_read_gets_a_sentence(tmp_path):
    with refused(names=[tmp_path, "experiment.json"]):
        read_run(tmp_path)
    directory = described(tmp_path / "run")
    (directory / "platform.json").write_text("{torn")
    with refused(names=[directory / "platform.json", "line 1"]):
        read_run(directory)


def test_two_runs_do_not_write_into_one_directory(tmp_path: Path):
    with Recorder(tmp_path):
        (tmp_path / "experiment.json").write_text("{}")
        (tmp_path / "platform.json").write_text("{}")
        with refused(names=[tmp_path, "wait"]):
            going_on(tmp_path, -1)
    going_on(tmp_path, -1).stop()
