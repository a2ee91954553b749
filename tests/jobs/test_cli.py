"""The commands as a user types them: what they print, what they leave behind, what a mistake gets."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import ClusterError
from jobs.single import run
from rayfl.errors import ClientError, RayflError
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.sweep import read_sweep
from rayfl.rounds.check_setup import check_retention
from rayfl.run_directory.record import read_run
from rayfl.run_directory.saved_models import load_model
from tests.contracts.seams.quadratic import Quadratic
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

EXPERIMENTS = sorted((Path(__file__).resolve().parents[2] / "jobs" / "experiments").glob("*.toml"))
SMALL = """
name = "small"
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedavg", lr = 0.1}
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_a_run_ends_in_a_table_records_models_and_a_report(file):
    result = rayfl("run", file, "--inline")
    assert result.exit_code == 0, result.output
    assert "final pooled/accuracy" in result.output
    for line in ("run directory: {}/runs/small\n", "report:        {}/runs/small/report.html\n"):
        assert line.format(file.parent) in result.output
    found = read_run(Path("runs/small"))
    assert found.finished and found.rounds["round"].to_pylist() == [0, 1]
    assert {name: tuple(tensor.shape) for name, tensor in load_model(Path("runs/small"), "global").items()} == {
        "1.weight": (10, 64),
        "1.bias": (10,),
    }
    assert Path("runs/small/report.html").exists() and list(Path("runs/small/tensorboard").iterdir())


def test_a_second_run_takes_the_next_name_and_a_named_directory_is_kept(file):
    for name in ("small", "small-2"):
        assert rayfl("run", file, "--inline", "--rounds", 1).exit_code == 0
        assert Path("runs", name, "experiment.json").exists()
    before = Path("runs/small/experiment.json").read_bytes()
    refused(rayfl("run", file, "--inline", "--output", "runs/small"), names=["runs/small", "--overwrite"])
    assert Path("runs/small/experiment.json").read_bytes() == before
    assert rayfl("run", file, "--inline", "--rounds", 1, "--output", "runs/small", "--overwrite").exit_code == 0
    assert len(read_run(Path("runs/small")).rounds) == 1


def test_a_run_from_its_own_resolved_file_gives_the_same_records(file):
    assert rayfl("run", file, "--inline", "--output", "first").exit_code == 0
    assert rayfl("run", "first/experiment.toml", "--inline", "--output", "second").exit_code == 0
    one, two = read_run(Path("first")), read_run(Path("second"))
    assert one.metrics == two.metrics and one.clients == two.clients
    assert one.rounds.drop_columns("wall_s") == two.rounds.drop_columns("wall_s")


def test_personal_models_are_those_after_local_training(file):
    assert rayfl("run", file, "--inline", "method.name=fedpse", "method.keep_ratio=0.5").exit_code == 0
    models = load_model(Path("runs/small"), "personal")
    assert sorted(models) == sorted(f"{client}/1.{part}" for client in range(4) for part in ("weight", "bias"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["method.keep_rato=0.05", "method.name=fedpse"], ["method.keep_rato", "keep_ratio"]),
        (["method.name=fedspe"], ["fedspe", "fedpse"]),
        (["clients.per_round=5"], ["5", "4 clients"]),
        (["model=convnet2"], ["convnet2", "16x16"]),
        (["clients.count=5000"], ["client"]),
        (["rounds=0"], ["rounds"]),
        (["method.lr=fast"], ["method.lr"]),
        (["nonsense"], ["nonsense", "key=value"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(file, arguments, words):
    refused(rayfl("run", file, "--inline", *arguments), names=words)
    assert not Path("runs").exists()


def test_a_missing_and_a_broken_file(file):
    refused(rayfl("run", "smal.toml"), names=["smal.toml", "small.toml"])
    file.write_text("rounds = = 3")
    refused(rayfl("run", file), names=["small.toml", "TOML"])


def test_data_prints_who_holds_what(file):
    result = rayfl("data", file)
    assert result.exit_code == 0, result.output
    line_with(result.output, ["all", "mean"])


def test_report_compares_runs_and_prints_numbers(file):
    for seed in (1, 2):
        assert rayfl("run", file, "--inline", f"seed={seed}", "--output", f"seed{seed}").exit_code == 0
    compared = rayfl("report", "seed1", "seed2", "--output", "both.html")
    assert compared.exit_code == 0
    # Both have the same accuracy, so that none is the best.
    assert "best" not in line_with(compared.output, ["2 runs", "pooled/accuracy"])
    assert f"report: {file.parent}/both.html\n" in compared.output
    assert Path("both.html").stat().st_size > 10_000
    numbers = json.loads(rayfl("report", "seed1", "seed2", "--json").stdout)
    # 650 parameters and a count of 8 bytes, four clients, two rounds.
    assert [run["uplink_megabytes"] for run in numbers] == [4 * 2 * (4 * 650 + 8) / 1e6] * 2
    refused(rayfl("report", "nowhere"), names=["nowhere"])
    assert rayfl("report", "seed1", "seed2", "--output", "both.html").exit_code == 0
    Path("mine.html").write_text("mine")
    refused(rayfl("report", "seed1", "--output", "mine.html"), names=["mine.html", "--overwrite"])
    assert Path("mine.html").read_text() == "mine"
    for name in ("experiment.json", "records/rounds.parquet", "page.html"):
        result = rayfl("report", "seed1", "--output", f"seed1/{name}", "--overwrite")
        refused(result, names=[f"seed1/{name}"])
    assert read_run(Path("seed1")).finished and rayfl("report", "seed1").exit_code == 0


def test_a_run_that_is_refused_late_leaves_no_directory(file, monkeypatch):
    def refuse(*arguments: object, **settings: object) -> None:
        raise RayflError("no actor of this cluster has a GPU")

    monkeypatch.setattr("jobs.single.play_run", refuse)
    refused(rayfl("run", file, "--inline"), names=["GPU", "actor"])
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize("error", [ClientError("round 3, client 7: boom"), ClusterError("the node is gone")])
def test_a_failing_run_ends_with_its_error_and_exit_code_1(file, monkeypatch, error):
    def fail(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("jobs.single.play_run", fail)
    result = rayfl("run", file, "--inline")
    assert result.exit_code == 1 and str(error) in result.stderr and "Traceback" not in result.stderr


def test_python_runs_an_experiment_too(tmp_path):
    table = {
        "rounds": 1,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 2},
        "model": "logistic",
        "method": "fedavg",
        "runtime": {"executor": "inline"},
    }
    assert len(read_run(run(Experiment(**table), tmp_path / "run")).rounds) == 1


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_experiment_is_valid_and_named_for_its_file(path):
    assert read(path).name == path.stem


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_combination_of_a_shipped_sweep_uses_its_retention_ratios(path):
    for combination in read_sweep(path) or []:
        found = combination.experiment
        check_retention(found.method.make(Quadratic(), found.rounds), found.uplink, found.clients)


@pytest.mark.slow
@pytest.mark.ray
def test_an_interrupted_run_ends_after_its_round_and_keeps_its_records(file):
    command = [
        sys.executable,
        "-m",
        "rayfl",
        "run",
        str(file),
        "--rounds",
        "100000",
        "--actors",
        "1",
        "--output",
        "run",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = str(EXPERIMENTS[0].parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=file.parent) as process:
        assert process.stdout is not None
        while "3/100000 rounds" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    found = read_run(Path("run"))
    assert not found.finished and 3 <= len(found.rounds) < 100_000
    line_with(rest, [f"{len(found.rounds)} of 100000", f"rayfl resume {Path('run').absolute()}"])


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (["--lr", "0.1"], "method.lr=0.1"),
        (["--learning-rate=0.1"], "method.lr=0.1"),
        (["--keep-ratio", "0.2"], "method.keep_ratio=0.2"),
        (["--num_clients"], "clients.count=VALUE"),
        (["--seed", "3"], "seed=3"),
        (["-p0.5"], "method.p=VALUE"),
    ],
)
def test_a_setting_given_as_an_option_is_shown_as_a_setting(file, option, setting):
    refused(rayfl("run", file, *option), names=["option", setting])


def test_an_option_that_is_no_setting_either_is_refused(file):
    result = rayfl("run", file, "--inlin")
    assert result.exit_code == 2 and "--inline" in result.stderr
    result = rayfl("run", file, "--zzz")
    assert result.exit_code == 2 and "--zzz" in result.stderr


def test_a_broken_pipe_that_is_not_standard_output_is_told(monkeypatch):
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("jobs.shipped_experiments.table", fail)
    result = rayfl("examples")
    assert result.exit_code in (1, 2) and "broken pipe" in result.stderr
