"""`rayfl tune`: what its trials are evaluated by, what it writes, and that a killed one goes on."""

import errno
import itertools
import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jobs
from actors.errors import ClusterError
from jobs.console import Audience
from jobs.display import Display
from jobs.failures import INTERRUPTED
from jobs.tune import BEST, Tuning, tune
from rayfl.experiment.experiment import read
from rayfl.experiment.sweep import read_sweep
from rayfl.experiment.table import read_table, with_overrides
from rayfl.report.groups import last_mean
from rayfl.rounds.setup import Setup
from rayfl.run_directory import play_run
from rayfl.run_directory.disk import locked
from rayfl.run_directory.record import Run, read_run
from rayfl.settings import dotted
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

pytestmark = pytest.mark.usefixtures("undrawn")

TABLE = """
name = "small"
rounds = 4
data = {name = "synthetic", num_groups = 6, samples_per_group = 20, num_classes = 4, dim = 8}
partition = "natural"
model = "logistic"
clients = {count = 6}
method = {name = "fedprox", steps = 2, batch_size = 5}
checkpoint = {every = 1}
runtime = {executor = "inline"}
output = {report = false, save_models = false}
"""
RANGES = """
[tune]
method.lr = {low = 0.001, high = 1.0, log = true}
method.steps = {low = 1, high = 5}
method.mu = [0.1, 1.0]
"""
CASES = """
[sweep]
seed = [1, 2]

[[sweep.case]]
label = "FedAvg"
method = {name = "fedavg", steps = 2}

[[sweep.case]]
label = "FedProx"
method = "fedprox"
tune.method.mu = [0.1, 1.0]

[tune]
method.lr = [0.01, 0.5]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "small.toml"
    path.write_text(TABLE + text)
    return path


def trials(directory: Path) -> dict[str, Run]:
    return {path.parent.name: read_run(path.parent) for path in directory.glob("*/experiment.json")}


def method_of(run: Run) -> dict[str, Any]:
    method = run.experiment["method"]
    assert isinstance(method, dict)
    return method


def tried(file: Path, directory: Path, budget: int, *overrides: str, after: int | None = None) -> int:
    """A tune in this process; it is stopped once it has asked `after` times whether to stop."""
    asked = itertools.count()
    stopping = Audience(display=Display(hidden=True), stopping=lambda: after is not None and next(asked) >= after)
    return tune(Tuning(*with_overrides(read_table(file), overrides), overrides), budget, directory, stopping)


def test_the_best_values_are_those_of_the_best_run_on_validation_data(tmp_path):
    file, place = written(tmp_path, RANGES), tmp_path / "tuned"
    result = rayfl("tune", file, "--budget", 6, "--dir", place, "tune.pruner=none", "seed=7")
    assert result.exit_code == 0, result.output
    runs = trials(place)
    assert len(runs) == 6
    for run in runs.values():
        settings = dotted(run.experiment)
        assert (settings["seed"], settings["evaluation.split"]) == (100, "validation")
        method = method_of(run)
        assert 0.001 <= method["lr"] <= 1 and 1 <= method["steps"] <= 5 and method["mu"] in (0.1, 1.0)
        assert run.finished and method["lr"] == float(f"{method['lr']:.3g}")
    # 6 rounds of 4, which the page and the file say.
    line_with(
        result.output, ["method.lr, method.steps, method.mu", "own/accuracy", "seed 100", "24 rounds", "6 of small"]
    )
    best = method_of(max(runs.values(), key=lambda run: last_mean(run, "own/accuracy", 3)))
    experiment = read(place / BEST)
    assert {key: getattr(experiment.method.hyper, key) for key in ("lr", "steps", "mu")} == {
        key: best[key] for key in ("lr", "steps", "mu")
    }
    # What is reported is as the file has it.
    assert (experiment.seed, experiment.evaluation.split, experiment.rounds) == (7, "test", 4)
    page = (place / "comparison.html").read_text()
    assert experiment.report.note and experiment.report.note in page and "evaluation.split = validation" in page


def test_a_tune_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    file = written(tmp_path, RANGES)
    # Five trials before the median prunes, so that some of these are pruned.
    assert tried(file, tmp_path / "whole", 9) == 0
    whole = trials(tmp_path / "whole")
    pruned = [name for name, run in whole.items() if not run.finished]
    assert pruned and all(0 < len(whole[name].rounds) < 4 for name in pruned)
    # Stopped in a round of the third trial, and again in the one that was pruned or in its neighbour.
    assert tried(file, tmp_path / "parts", 9, after=7) == INTERRUPTED
    assert not (tmp_path / "parts" / BEST).exists() and len(trials(tmp_path / "parts")) == 3
    assert tried(file, tmp_path / "parts", 9, after=14) == INTERRUPTED
    assert tried(file, tmp_path / "parts", 9) == 0
    parts = trials(tmp_path / "parts")
    assert parts.keys() == whole.keys()
    for name, run in parts.items():
        assert (run.finished, run.metrics) == (whole[name].finished, whole[name].metrics)
    assert (tmp_path / "parts" / BEST).read_text() == (tmp_path / "whole" / BEST).read_text()


def test_a_larger_budget_goes_on_with_the_same_trials(tmp_path):
    file, place = written(tmp_path, RANGES), tmp_path / "tuned"
    tried(file, place, 2)
    before = {name: run.directory.stat().st_ino for name, run in trials(place).items()}
    tried(file, place, 4)
    after = {name: run.directory.stat().st_ino for name, run in trials(place).items()}
    assert len(before) == 2 and len(after) == 4 and before.items() <= after.items()


def test_lists_alone_are_tried_once_each(tmp_path):
    file, place = (
        written(tmp_path, "[tune]\nmethod.lr = [0.01, 0.1, 1.0]\nmodel = ['logistic', {name = 'mlp', hidden = [4]}]\n"),
        tmp_path / "tuned",
    )
    assert tried(file, place, 20) == 0
    found = {(method_of(run)["lr"], dotted(run.experiment)["model.name"]) for run in trials(place).values()}
    assert found == set(itertools.product([0.01, 0.1, 1.0], ["logistic", "mlp"]))


def test_each_case_is_tuned_by_itself_and_all_are_in_one_sweep(tmp_path):
    file, place = written(tmp_path, CASES), tmp_path / "tuned"
    assert tried(file, place, 2) == 0
    runs = trials(place)
    assert len(runs) == 4 and sum(name.startswith("FedAvg") for name in runs) == 2
    assert all("mu" in name for name in runs if name.startswith("FedProx"))
    combinations = read_sweep(place / BEST)
    assert combinations is not None
    assert [one.title for one in combinations] == [
        "seed=1, FedAvg",
        "seed=1, FedProx",
        "seed=2, FedAvg",
        "seed=2, FedProx",
    ]
    for one in combinations:
        label = one.title.partition(", ")[2]
        own = [run for name, run in runs.items() if name.startswith(label)]
        best = method_of(max(own, key=lambda run: last_mean(run, "own/accuracy", 3)))
        method = json.loads(json.dumps(one.experiment.as_dict()["method"]))
        assert method == best and one.experiment.evaluation.split == "test"
        assert one.experiment.report.note and "2 of FedAvg, 2 of FedProx" in one.experiment.report.note


def test_the_best_file_has_the_users_overrides_and_the_seed_of_the_sweep(tmp_path):
    file, place = written(tmp_path, CASES.replace("[1, 2]", "[7]")), tmp_path / "tuned"
    assert tried(file, place, 1, "method.steps=3") == 0
    found = [dotted(one.experiment.as_dict()) for one in read_sweep(place / BEST) or ()]
    assert [(one["seed"], one["method.steps"]) for one in found] == [(7, 3), (7, 3)]
    assert {method_of(run)["steps"] for run in trials(place).values()} == {3}


def test_a_trial_that_fails_or_diverges_is_the_worst(tmp_path):
    # Top k refuses values that are not finite.
    file = written(tmp_path, "uplink = 'topk'\n[tune]\nmethod.lr = [0.1, 1e30]\n")
    assert tried(file, tmp_path / "tuned", 2) == 0
    assert tomllib.loads((tmp_path / "tuned" / BEST).read_text())["method"]["lr"] == 0.1
    file = written(tmp_path, "uplink = 'topk'\n[tune]\nmethod.lr = [2e30, 1e30]\n")
    refused(lambda: tried(file, tmp_path / "failed", 2), names=["small", "own/accuracy", "NaN"])


def test_a_loss_is_minimized(tmp_path):
    file, place = written(tmp_path, "[tune]\nmethod.lr = [1e-6, 0.3]\n"), tmp_path / "tuned"
    assert tried(file, place, 2, "report.metric=own/loss") == 0
    losses = {method_of(run)["lr"]: last_mean(run, "own/loss", 3) for run in trials(place).values()}
    assert tomllib.loads((place / BEST).read_text())["method"]["lr"] == min(losses, key=losses.__getitem__)
    assert len({*losses.values()}) == 2


@pytest.mark.parametrize(
    ("text", "settings", "names"),
    [
        ("", [], ["tune.KEY", "small"]),
        (RANGES, ["method.lr=0.1", "method.mu=1.0", "method.steps=1"], ["tune.KEY"]),
        (RANGES, ["seed=100"], ["tune.seed=100"]),
        (RANGES, ["tune.pruner=best"], ["pruner='best'", "'asha'"]),
        (RANGES, ["tune.method.lrr={low=0.1, high=1.0}"], ["method.lrr", "lr"]),
        (RANGES, ["tune.method.lr={low=-1.0, high=1.0}"], ["method.lr=-1.0"]),
        ("", ["tune.method.lr={low=1.0, high=0.1}"], ["tune.method.lr", "low", "high"]),
        ("", ["tune.method.lr={lo=0.1, high=1.0}"], ["tune.method.lr", "low = ..."]),
        ("", ["tune.method.lr=0.1"], ["tune.method", "0.1"]),
        ("", ["tune.method.lr=[]"], ["tune.method.lr=[]"]),
        ("", ["tune.evaluation.split=['test', 'validation']"], ["tune.evaluation.split"]),
        ("", ["tune.seed=[1, 2]"], ["seed=[1, 2]"]),
        (RANGES, ["splits.validation_ratio=0"], ["splits.validation_ratio=0"]),
        (RANGES, ["report.metric=own/f1"], ["report.metric='own/f1'"]),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(tmp_path, text, settings, names):
    refused(rayfl("tune", written(tmp_path, text), "--budget", 2, "--dir", tmp_path / "tuned", *settings), names=names)
    assert not (tmp_path / "tuned").exists()


def test_a_directory_of_other_runs_is_refused(tmp_path):
    file, place = written(tmp_path, "[tune]\nmethod.lr = [0.1, 0.2]\n"), tmp_path / "tuned"
    tried(file, place, 2)
    names = [place / "lr=0.1", "rounds=4 -> 5", "--dir"]
    refused(rayfl("tune", file, "--budget", 2, "--dir", place, "rounds=5", "method.steps=2"), names=names[1:])


def test_a_file_to_tune_is_no_file_to_run(tmp_path):
    file = written(tmp_path, RANGES)
    refused(rayfl("run", file), names=["[tune]", "rayfl tune FILE"])


def test_without_optuna_the_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "jobs.tune")
    monkeypatch.delattr(jobs, "tune")
    refused(rayfl("tune", written(tmp_path, RANGES), "--budget", 2), names=["optuna", "pip install 'rayfl[tune]'"])


def test_values_that_do_not_go_together_are_a_failed_trial(tmp_path):
    # Ditto: lr times lam must be below 1.
    text = "[tune]\nmethod.personal_lr = [0.1, 0.5]\nmethod.lam = [0.1, 5.0]\n"
    file, place = written(tmp_path, text), tmp_path / "tuned"
    assert tried(file, place, 4, "method={name='ditto', steps=1}") == 0
    assert {*trials(place)} == {"personal_lr=0.1,lam=0.1", "personal_lr=0.5,lam=0.1", "personal_lr=0.1,lam=5.0"}


LISTS = "[tune]\nmethod.lr = [0.001, 0.5]\n"


def test_two_tunes_in_one_folder_are_refused(tmp_path):
    file, place = written(tmp_path, LISTS), tmp_path / "tuned"
    with locked(place):
        refused(rayfl("tune", file, "--budget", 2, "--dir", place), names=[place, "another process"])
    assert not trials(place) and not (place / BEST).exists()


@pytest.mark.parametrize("lost", ["lock", "disk", "cluster", "memory"])
def test_a_failure_of_the_machine_ends_the_tuning_and_is_no_bad_value(tmp_path, monkeypatch, lost: str):
    """lr=0.5 is the better value, and is tried while the machine fails."""
    file, place = written(tmp_path, LISTS), tmp_path / "tuned"
    assert rayfl("tune", file, "--budget", 2, "--dir", tmp_path / "calm").exit_code == 0
    trial = place / "lr=0.5"

    def fail(*arguments: object) -> None:
        raise {
            "disk": OSError(errno.ENOSPC, "No space left on device"),
            "cluster": ClusterError("Ray is gone"),
            "memory": MemoryError("no memory"),
        }[lost]

    if lost == "lock":
        trial.mkdir(parents=True)
        with locked(trial):
            result = rayfl("tune", file, "--budget", 2, "--dir", place)
    else:
        simulate = play_run.simulate

        def failing(setup: Setup, *arguments: Any, **options: Any) -> Any:
            return fail() if getattr(setup.method.hyper, "lr", None) == 0.5 else simulate(setup, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(play_run, "simulate", failing)
            result = rayfl("tune", file, "--budget", 2, "--dir", place)
    assert result.exit_code in (1, 2), result.output
    line_with(result.stderr, ["lr=0.5", f"--dir {place}"])
    assert not (place / BEST).exists()
    shutil.rmtree(trial, ignore_errors=True)
    # When the cause is gone, the same command gives what it gives without it.
    again = rayfl("tune", file, "--budget", 2, "--dir", place)
    assert again.exit_code == 0, again.output
    assert (place / BEST).read_text() == (tmp_path / "calm" / BEST).read_text()
    assert tomllib.loads((place / BEST).read_text())["method"]["lr"] == 0.5


def test_trials_without_a_value_are_counted_and_named_and_the_best_value_is_printed(tmp_path):
    file = written(tmp_path, "uplink = 'topk'\n[tune]\nmethod.lr = [0.1, 1e30]\nmethod.mu = [0.1, 1.0]\n")
    place = tmp_path / "tuned"
    result = rayfl("tune", file, "--budget", 4, "--dir", place)
    assert result.exit_code == 0, result.output
    runs = trials(place)
    for name in ("lr=1e+30, mu=0.1", "lr=1e+30, mu=1.0"):
        line_with(result.output, [name, "diverged", "NaN"])
    value = max(last_mean(runs[f"lr=0.1,mu={mu}"], "own/accuracy", 3) for mu in ("0.1", "1.0"))
    line_with(result.output, ["best of small", f"own/accuracy {value:g}", "lr=0.1"])
    line_with(result.output, ["4 of small", "2 diverged, 0 failed"])
    # Ditto: lr times lam must be below 1.
    file = written(tmp_path, "[tune]\nmethod.personal_lr = [0.5]\nmethod.lam = [0.1, 5.0]\n")
    ranges = ["method={name='ditto', steps=1}"]
    result = rayfl("tune", file, "--budget", 2, "--dir", tmp_path / "ditto", *ranges)
    line_with(result.output, ["lam=5.0", "failed"])
    line_with(result.output, ["2 of small", "0 diverged, 1 failed"])
