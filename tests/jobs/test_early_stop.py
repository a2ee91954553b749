"""A `[stop]` table in the commands: run, resume, sweep, tune, --dry-run and reports."""

import json
import tomllib
from pathlib import Path

import pytest
from pyarrow import compute

from rayfl.run_directory.record import read_run
from rayfl.run_directory.saved_models import load_model, read_model_inputs
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, refused

pytestmark = pytest.mark.usefixtures("undrawn")

FILE = """
name = "small"
rounds = 30
data = {name = "synthetic", num_groups = 6, samples_per_group = 20, num_classes = 4, dim = 8}
partition = "natural"
model = "logistic"
clients = {count = 6}
method = {name = "fedavg", lr = 0.1, steps = 2, batch_size = 5}
runtime = {executor = "inline"}
output = {report = false, save_models = false}
stop = {patience = 2, min_delta = 0.03}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(FILE)
    return path


def test_a_run_that_ended_early_is_finished_and_says_why(file: Path, tmp_path: Path):
    result = rayfl("run", file, "--output", tmp_path / "run")
    rounds = len(read_run(tmp_path / "run").rounds)
    assert result.exit_code == 0 and 2 < rounds < 30
    line_with(result.output, ["ended early", "own/accuracy"])
    (summary,) = json.loads(rayfl("report", "--json", tmp_path / "run").output)
    check_sentence(summary["early_stop"], ["own/accuracy", "stop.patience=2", "stop.min_delta=0.03"])
    assert f"finished: {rounds} of 30" in rayfl("show", tmp_path / "run").output
    # Neither the same command nor another number of rounds goes on with it.
    assert "nothing is left to run" in rayfl("run", file, "--output", tmp_path / "run", "--resume").output
    refused(
        rayfl("resume", tmp_path / "run", "--rounds", "40"), names=[tmp_path / "run", "finished", "stop.patience=2"]
    )
    assert len(read_run(tmp_path / "run").rounds) == rounds


def test_a_run_that_its_rounds_ended_can_be_extended_until_it_ends_early(file: Path, tmp_path: Path):
    whole = rayfl("run", file, "--output", tmp_path / "whole")
    assert whole.exit_code == 0
    assert rayfl("run", file, "--output", tmp_path / "run", "--rounds", 3).exit_code == 0
    assert "ended early" not in rayfl("show", tmp_path / "run").output
    assert rayfl("resume", tmp_path / "run", "--rounds", 30).exit_code == 0
    runs = [read_run(tmp_path / name) for name in ("whole", "run")]
    assert runs[0].metrics.equals(runs[1].metrics) and 3 < len(runs[1].rounds) < 30


def test_runs_of_a_sweep_end_each_by_themselves(file: Path, tmp_path: Path):
    command = ("sweep", file, "sweep.seed=[1,2]", "sweep.stop.patience=[1,3]", "--dir", tmp_path / "sweep")
    assert rayfl(*command).exit_code == 0
    rounds = {path.parent.name: len(read_run(path.parent).rounds) for path in tmp_path.glob("sweep/*/experiment.json")}
    assert len(rounds) == 4 and len({*rounds.values()}) > 1 and max(rounds.values()) < 30
    again = rayfl(*command)
    assert again.exit_code == 0 and again.output.count(": skipped") == 4


def test_trials_of_a_tuning_end_early(file: Path, tmp_path: Path):
    result = rayfl("tune", file, "tune.method.lr=[0.05,0.2]", "--budget", 2, "--dir", tmp_path / "tune")
    assert result.exit_code == 0, result.output
    assert all(len(read_run(path.parent).rounds) < 30 for path in tmp_path.glob("tune/*/experiment.json"))
    assert "[stop]" in (tmp_path / "tune" / "best.toml").read_text()


def test_the_best_file_of_a_tuning_does_not_say_where_its_trials_ran(file: Path, tmp_path: Path):
    file.write_text(FILE.replace('runtime = {executor = "inline"}', "runtime = {threads = 1}"))
    result = rayfl("tune", file, "tune.method.lr=[0.1]", "--budget", 1, "--dir", tmp_path / "tune", "--inline")
    assert result.exit_code == 0, result.output
    best = tomllib.loads((tmp_path / "tune" / "best.toml").read_text())
    assert best["runtime"] == {"threads": 1}


def test_a_dry_run_tells_the_most_that_the_run_takes(file: Path):
    early, plain = rayfl("run", file, "--dry-run").output, rayfl("run", file, "--dry-run", "stop.patience=30").output
    assert "at most 30 rounds" in early
    assert line_with(early, ["bytes up"]) == line_with(plain, ["bytes up"])


def test_the_models_of_the_best_evaluation_are_kept(file: Path, tmp_path: Path):
    best, last, short = (tmp_path / name for name in ("best", "last", "short"))
    asked = ("output.save_models=true", 'stop.metric="own/accuracy"', "stop.min_delta=0.0")
    assert rayfl("run", file, *asked, "stop.keep=best", "--output", best).exit_code == 0
    is_mean = (compute.field("name") == "own/accuracy") & compute.field("client").is_null()
    values = read_run(best).metrics.filter(is_mean)["value"].to_pylist()
    number = read_model_inputs(best).round
    assert number is not None and number == values.index(max(values)) < len(values) - 1
    assert rayfl("run", file, *asked, "--output", last).exit_code == 0
    assert read_model_inputs(last).round is None
    # The same rounds as those of a run that ends there, whose last model it is.
    assert rayfl("run", file, *asked, "--rounds", number + 1, "--output", short).exit_code == 0
    models = [load_model(run, "global") for run in (best, last, short)]
    assert all(tensor.equal(models[2][name]) for name, tensor in models[0].items())
    assert not all(tensor.equal(models[1][name]) for name, tensor in models[0].items())
    refused(rayfl("run", file, "stop.keep=best"), names=["stop.keep", "output.save_models=false"])


def test_a_resumed_run_keeps_its_stop(file: Path, tmp_path: Path):
    assert rayfl("run", file, "--output", tmp_path / "run", "--rounds", 2).exit_code == 0
    changed = rayfl("resume", tmp_path / "run", "--rounds", 30, "stop.patience=3")
    refused(changed, names=["stop.patience=2 -> 3", "[stop] has counted", "new run"])
