"""`rayfl prune`, `pack` and `note`, and what `rayfl ls` finds by them."""

import json
import tarfile
from pathlib import Path

import pytest

from rayfl.run_directory.disk import locked
from rayfl.run_directory.record import read_run
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

FILE = """
rounds = 2
data = {name = "table", path = "data/patients.csv"}
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "mine.py:Mine", lr = 0.1}
checkpoint = {every = 1}
runtime = {executor = "inline"}
output = {save_models = false}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home with a finished run of own data and an own method, whose name is not ASCII."""
    home = tmp_path_factory.mktemp("user") / "J\u00f6rg"
    (home / "work" / "data").mkdir(parents=True)
    rows = "\n".join(f"{number % 7},{number % 2}" for number in range(60))
    (home / "work" / "data" / "patients.csv").write_text(f"age,label\n{rows}")
    (home / "work" / "mine.py").write_text(
        "from rayfl.methods.server.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    paper = 'None'\n"
    )
    (home / "work" / "small.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        # So the run records the absolute paths of its data.
        (home / "elsewhere").mkdir()
        patch.chdir(home / "elsewhere")
        result = rayfl("run", home / "work" / "small.toml", "--output", home / "runs" / "first")
        assert result.exit_code == 0, result.output
        assert rayfl("run", home / "work" / "small.toml", "seed=2", "--output", home / "runs" / "second").exit_code == 0
    return home


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "elsewhere")


def test_a_pack_names_neither_home_nor_host_and_its_run_goes_on(home: Path, tmp_path: Path):
    result = rayfl("pack", home / "runs", "--output", tmp_path / "shared.tar.gz")
    assert result.exit_code == 0 and "2 runs" in result.output
    refused(
        rayfl("pack", home / "runs", "--output", tmp_path / "shared.tar.gz"), names=["shared.tar.gz", "--overwrite"]
    )
    with tarfile.open(tmp_path / "shared.tar.gz") as archive:
        assert {(entry.uid, entry.uname) for entry in archive} == {(0, "")}
        archive.extractall(tmp_path, filter="data")
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    for path in files:
        assert home.name.encode() not in path.read_bytes() and "J\\u00f6rg" not in path.read_text(errors="ignore"), path
    assert not any("checkpoints" in path.parts or "tensorboard" in path.parts for path in files)
    assert "host" not in json.loads((tmp_path / "runs" / "first" / "origin.json").read_text())
    assert read_run(tmp_path / "runs" / "first").metrics.equals(read_run(home / "runs" / "first").metrics)
    resumed = rayfl("resume", tmp_path / "runs" / "first", "--rounds", 3)
    assert resumed.exit_code == 0, resumed.output


def test_what_cannot_be_packed(home: Path, tmp_path: Path):
    refused(rayfl("pack", tmp_path), names=[tmp_path, "no run"])
    with locked(home / "runs" / "first"):
        refused(rayfl("pack", home / "runs", "--output", tmp_path / "x.tar.gz"), names=["first", "running"])
    assert not [*tmp_path.iterdir()]


def test_notes_and_tags_are_listed_and_found(home: Path):
    run = home / "runs" / "first"
    assert rayfl("note", run, "a good one", "--tag", "paper", "--tag", "old").exit_code == 0
    assert rayfl("note", run, "--untag", "old").exit_code == 0
    listed = rayfl("ls", home / "runs").output
    line_with(listed, ["first", "paper", "a good one"])
    for where, count in {
        "tag=paper": 1, "tag=old": 0, "state=finished": 2, "state=running": 0, "seed=2": 1, "data=table": 2,
        "method.lr=0.1": 2, "checkpoint.every=2": 0,
    }.items():  # fmt: skip
        assert f"{count or 'no'} run" in rayfl("ls", home / "runs", "--where", where).output, where
    assert (
        "1 run with seed=1 tag=paper" in rayfl("ls", home / "runs", "--where", "seed=1", "--where", "tag=paper").output
    )
    refused(rayfl("ls", home / "runs", "--where", "paper"), names=["--where paper", "tag=paper"])
    refused(rayfl("note", run, "--tag", "a b"), names=["'a b'"])
    refused(rayfl("note", home / "work", "x"), names=[home / "work", "run directory"])


def test_checkpoints_of_finished_runs_are_removed(home: Path, tmp_path: Path):
    assert rayfl(
        "run", home / "work" / "small.toml", "runtime.limit_s=0.01", "--output", tmp_path / "stopped"
    ).exit_code
    assert rayfl("run", home / "work" / "small.toml", "--output", tmp_path / "whole").exit_code == 0
    shown = rayfl("prune", tmp_path, "--dry-run").output
    assert "would be freed" in shown and (tmp_path / "whole" / "checkpoints").is_dir()
    result = rayfl("prune", tmp_path)
    assert result.exit_code == 0 and not (tmp_path / "whole" / "checkpoints").exists()
    line_with(result.output, ["stopped", "stay"])
    # The one resumes from its checkpoint, the other from the start, and both give the same rounds.
    for name in ("stopped", "whole"):
        resumed = rayfl("resume", tmp_path / name, "--rounds", 3, "runtime.limit_s=100")
        assert resumed.exit_code == 0, resumed.output
    assert read_run(tmp_path / "stopped").metrics.equals(read_run(tmp_path / "whole").metrics)
