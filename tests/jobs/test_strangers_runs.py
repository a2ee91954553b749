"""Runs that somebody else made: what is in their directories is not obeyed unasked."""

import json
import shutil
from pathlib import Path

import pytest

import rayfl
from jobs.single import resume
from rayfl.report.results import RunResults
from rayfl.run_directory.record import read_run
from tests.refusals import refused

METHOD = """
from rayfl.methods.server.fedavg import FedAvg


class Mine(FedAvg):
    pass
"""
URL = "s3://somewhere/else"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of one round, with a method in a file."""
    (tmp_path / "mine.py").write_text(METHOD)
    rayfl.run(
        directory=tmp_path / "run",
        progress=False,
        data="digits",
        partition="iid",
        model="logistic",
        clients={"count": 3},
        method={"name": f"{tmp_path}/mine.py:Mine", "lr": 0.1},
        rounds=1,
        runtime={"executor": "inline"},
        output={"report": False},
    )
    return tmp_path / "run"


def change(path: Path, **tables: object) -> None:
    found = json.loads(path.read_text())
    for key, value in tables.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(found))


def exchanged(directory: Path) -> None:
    (copy,) = (directory / "files").rglob("*.py")
    copy.write_text(METHOD + f"\nopen({str(directory / 'ran')!r}, 'w')\n")


def named_elsewhere(directory: Path) -> None:
    other = directory.parent / "other.py"
    other.write_text(METHOD + f"\nopen({str(directory / 'ran')!r}, 'w')\n")
    change(directory / "experiment.json", method={"name": f"{other}:Mine"})
    (directory / "experiment.toml").unlink()


@pytest.mark.parametrize("damage", [exchanged, named_elsewhere])
def test_an_exchanged_plug_in_is_refused_before_it_runs(directory: Path, damage):
    damage(directory)
    with refused(names=["method.name", "FILE"]):
        rayfl.resume(directory, rounds=2)
    assert not (directory / "ran").exists()


def test_a_model_of_an_exchanged_class_is_not_built(directory: Path, tmp_path: Path):
    source = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "net.py").write_text(source)
    shutil.rmtree(directory)
    rayfl.run(
        directory=directory,
        progress=False,
        data="digits",
        partition="iid",
        model=f"{tmp_path}/net.py:net",
        clients={"count": 3},
        method={"name": "fedavg", "lr": 0.1},
        rounds=1,
        runtime={"executor": "inline"},
        output={"report": False},
    )
    found = rayfl.load(directory)
    assert isinstance(found, RunResults) and found.model()
    (copy,) = (directory / "files").rglob("*.py")
    copy.write_text(source + f"\nopen({str(directory / 'ran')!r}, 'w')\n")
    again = rayfl.load(directory)
    assert isinstance(again, RunResults)
    with refused(names=["model.name", "FILE"]):
        again.model()
    assert not (directory / "ran").exists()


def test_its_own_plug_in_can_be_given_again(directory: Path, tmp_path: Path):
    (copy,) = (directory / "files").rglob("*.py")
    copy.unlink()
    found = rayfl.resume(directory, f"method.name={tmp_path}/mine.py:Mine", rounds=2, progress=False)
    assert len(found.rounds) == 2


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("output", "directory", URL), ("runtime", "address", "10.1.2.3:6379")],
)
def test_where_a_run_from_elsewhere_goes_is_asked_for(directory: Path, table: str, key: str, value: str):
    change(directory / "experiment.json", **{table: {key: value}})
    change(directory / "origin.json", host="elsewhere")
    (directory / "experiment.toml").unlink()
    names = ["elsewhere", value, f"{table}.{key}={value}"]
    with refused(names=names):
        rayfl.resume(directory, rounds=2)
    # Finished, it would only be copied.
    with refused(names=names):
        resume(directory)
    (directory / "origin.json").unlink()
    with refused(names=["an unknown host", value]):
        resume(directory, ["rounds=2"])
    given = {"output.directory": "runs", "runtime.address": "local"}[f"{table}.{key}"]
    resume(directory, ["rounds=2", f"{table}.{key}={given}"])
    assert len(read_run(directory).rounds) == 2
