"""The content of data files is part of a run's identity."""

import json
from pathlib import Path

import numpy as np
import pytest

from rayfl.experiment.experiment import read
from rayfl.report.groups import group_runs
from rayfl.run_directory.record import read_run
from tests.jobs.commands import rayfl
from tests.refusals import refused

CONFIG = """
rounds = 2
data = {name = "table", path = "patients.csv"}
partition = "iid"
clients = {count = 2}
model = "logistic"
method = {name = "fedavg", lr = 0.1, batch_size = 16}
checkpoint = {every = 1}
output = {report = false, save_models = false}
"""


def write_patients(folder: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [f"{i % 7},{i % 3},{label}" for i, label in enumerate(generator.integers(0, 2, 60))]
    (folder / "patients.csv").write_text("\n".join(["age,ward,label", *rows]))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "patients.toml").write_text(CONFIG)
    write_patients(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "patients.toml", "--inline", "--output", "first")
    assert result.exit_code == 0, result.output
    return tmp_path


def test_a_run_goes_on_with_the_same_data_alone(home: Path):
    digest = json.loads(Path("first/experiment.json").read_text())["data"]["digest"]
    assert list(digest) == ["patients.csv"]
    write_patients(home, 1)
    found = [home / "patients.csv", "data.digest", digest["patients.csv"]]
    refused(rayfl("resume", "first", "--rounds", 3), names=found)
    refused(rayfl("run", "first/experiment.toml", "--inline", "--output", "second"), names=found)
    refused(rayfl("run", "patients.toml", "--inline", "--output", "first", "--resume"), names=["patients.csv"])
    (home / "patients.csv").unlink()
    missing = refused(rayfl("resume", "first", "--rounds", 3), names=["patients.csv", *found[1:], "missing"])
    assert "nothing" not in missing
    write_patients(home, 0)
    result = rayfl("resume", "first", "--rounds", 3)
    assert result.exit_code == 0, result.output
    assert len(read_run(Path("first")).rounds) == 3
    result = rayfl("run", "first/experiment.toml", "--inline", "--output", "second")
    assert result.exit_code == 0, result.output
    assert read(Path("second/experiment.toml")) == read(Path("first/experiment.toml"))


def test_runs_of_other_data_are_no_seeds_of_one_experiment(home: Path):
    for name, data in (("same", 0), ("other", 1)):
        write_patients(home, data)
        result = rayfl("run", "patients.toml", "--inline", "--output", name, "seed=2")
        assert result.exit_code == 0, result.output
    found = group_runs([read_run(home / name) for name in ("first", "same", "other")])
    assert [len(group.runs) for group in found] == [2, 1]
    assert all("patients.csv=" in group.label for group in found)
