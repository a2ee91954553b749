"""Early stop: the rule by hand, a run that ends early, and the same end after a cut, on Ray, and between any rounds."""

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from actors import session
from rayfl.experiment.prepare import prepare
from rayfl.metrics.facts import RECORDED_BEFORE
from rayfl.rounds.early_stop import EarlyStop, stop_rule
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run
from rayfl.run_directory.record import read_run
from rayfl.testing.executors import play, rows
from tests.actors.toys import assert_same_run, experiment, logged, play_on_ray, write_experiment
from tests.refusals import check_sentence, refused


@pytest.mark.parametrize(
    ("settings", "values", "ends", "names"),
    [
        ({"patience": 2}, [0.5, 0.6, 0.6, 0.59, 0.9], 4, ["stop.patience=2", "0.6"]),
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.5, 0.7], None, []),
        ({"patience": 2, "min_delta": 0.1}, [0.5, 0.55, 0.61, 0.65, 0.7], 5, ["stop.min_delta=0.1", "0.61"]),
        ({"target": 0.8}, [0.7, 0.8, 0.9], 2, ["stop.target=0.8", "is 0.8"]),
        # It is reached, although it is no improvement by min_delta.
        ({"target": 0.8, "patience": 9, "min_delta": 0.5}, [0.7, 0.81], 2, ["stop.target=0.8"]),
        ({"metric": "own/loss", "target": 0.3}, [0.5, 0.4, 0.3], 3, ["own/loss", "stop.target=0.3"]),
        ({"metric": "own/loss", "patience": 1}, [0.5, 0.4, 0.41], 3, ["own/loss", "0.4"]),
        # Undefined and infinite values are no improvement.
        ({"patience": 2}, [nan, None, 0.1], 2, []),
        ({"metric": "own/loss", "patience": 2}, [1.0, float("inf"), nan], 3, []),
    ],
)
def test_the_rule_by_hand(settings: dict[str, Any], values: list[float | None], ends: int | None, names: list[str]):
    rule = stop_rule(EarlyStop(**settings), RECORDED_BEFORE, by_client=True)
    state, reasons = {}, []
    for value in values:
        state = rule.after(state, value)
        reasons.append(rule.reason(state))
    assert next((count for count, reason in enumerate(reasons, 1) if reason), None) == ends
    if ends and names:
        check_sentence(reasons[ends - 1], names)


TARGET = {"metric": "own/accuracy", "target": 0.75}


def stopping(method: str = "fedpse", **changes: Any) -> Setup:
    """An experiment of 30 rounds that ends early; it is evaluated after every second one."""
    return prepare(experiment(method, rounds=30, evaluation={"every": 2}, **{"stop": TARGET, **changes}))


PRIVATE = {
    "wrap": {"name": "central-dp", "norm": 0.5},
    "method": {"name": "fedavg", "lr": 0.1, "batch_size": 16, "weighting": "uniform"},
    "selection": "poisson",
}
BUFFERED = {"schedule": {"name": "buffered", "buffer": 2}, "clients": {"count": 10, "per_round": 4}}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedpse", {}),
        ("fedavg", BUFFERED),
        ("fedavg", {"stop": {"patience": 1, "min_delta": 0.1, "metric": "pooled/accuracy"}}),
        # Epsilon is that of the rounds that were played.
        ("fedavg", {**PRIVATE, "stop": {"patience": 2}}),
        ("dpsgd", {"topology": "ring", "clients": {"count": 10}}),
        ("mcepl", {"topology": "ring", "clients": {"count": 10}, "evaluation": {"every": 1, "masks": True}}),
    ],
)
def test_a_run_that_ends_early_is_the_run_of_so_many_rounds(method: str, changes: dict[str, Any], tmp_path: Path):
    setup = prepare(experiment(method, rounds=30, **{"evaluation": {"every": 2}, "stop": TARGET, **changes}))
    records, _ = play(setup)
    assert 1 < len(records) < 30 and setup.evaluated(len(records) - 1)
    shorter = replace(setup, stop=None, rounds=len(records))
    assert rows(records) == rows(play(shorter)[0])
    for name, each in (("early", setup), ("shorter", shorter)):
        play_run(each, InlineExecutor(each), RunOutput(tmp_path / name))
    assert_same_run(tmp_path / "early", tmp_path / "shorter")


@pytest.mark.parametrize(("method", "changes"), [("fedpse", {}), ("fedavg", BUFFERED)])
def test_a_run_that_is_cut_after_any_round_ends_in_the_same_one(method: str, changes: dict[str, Any], tmp_path: Path):
    patient = {"stop": {"patience": 2, "min_delta": 0.05}}
    setup = stopping(method, **{**patient, **changes})
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "undisturbed"))
    (tmp_path / "cut").mkdir()
    directory, resumed = write_experiment(tmp_path / "cut"), False
    for _ in range(30):
        try:
            output = RunOutput(directory, checkpoints=Checkpoints(every=1), resumed=resumed)
            play_run(setup, InlineExecutor(setup), output, Listener(stopping=lambda: True))
            break
        except Stopped:
            resumed = True
    assert_same_run(tmp_path / "undisturbed", directory)
    assert len(read_run(directory).rounds) < 30


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_run_on_ray_ends_in_the_same_round_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "rayfl")
    setup = stopping()
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "inline"))
    (tmp_path / "ray").mkdir()
    chosen = experiment("fedpse", rounds=30, evaluation={"every": 2}, stop=TARGET, runtime={"actors": 2})
    assert session.address() is not None
    assert play_on_ray(chosen, prepare(chosen), write_experiment(tmp_path / "ray"), Listener())
    assert_same_run(tmp_path / "inline", tmp_path / "ray")
    rounds = len(read_run(tmp_path / "ray").rounds)
    for sentence in logged(caplog):
        check_sentence(sentence, [f"{rounds} of 30", "own/accuracy", "stop.target=0.75"])
    assert len(logged(caplog)) == 2


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"stop": {}}, ["stop", "patience", "target"]),
        ({"stop": {"min_delta": 0.1, "target": 0.5}}, ["stop.min_delta=0.1", "patience"]),
        ({"stop": {"target": 80.0}}, ["stop.target=80", "own/accuracy", "0 to 1"]),
        ({"stop": {"patience": 1, "metric": "own/acuracy"}}, ["stop.metric='own/acuracy'", "own/accuracy"]),
        (
            {"stop": {"patience": 1, "metric": "personal_pooled/accuracy"}},
            ["stop.metric='personal_pooled/accuracy'", "evaluation.personal_on_pooled=true"],
        ),
        ({"stop": {"patience": 1}, "evaluation": {"every": 0}}, ["stop", "evaluation.every=0"]),
        ({"stop": {"patience": 1}, "evaluation": {"own": False, "train": True}, "method": "dpsgd", "topology": "ring",
          "clients": {"count": 10}}, ["stop.metric='pooled/accuracy'", "evaluation.pooled=true"]),
        (
            {"stop": {"patience": 1}, "method": {"name": "fedavg", "lr_schedule": "cosine"}},
            ["stop", "rounds=4", "fedavg", "method.lr_rounds"],
        ),
        (
            {"stop": {"patience": 1}, "method": "dispfl", "topology": "ring", "clients": {"count": 10}},
            ["stop", "rounds=4", "dispfl"],
        ),
    ],
)  # fmt: skip
def test_an_early_stop_that_cannot_work_is_refused_before_the_run(changes: dict[str, Any], names: list[str]):
    with refused(names=names):
        prepare(experiment(**changes))


def test_a_metric_that_is_not_recorded_is_refused_after_the_first_evaluation():
    # FedPSE's server has no model, which is known once it is evaluated.
    with refused(names=["stop.metric='pooled/accuracy'", "own/accuracy"]):
        play(stopping(stop={"patience": 1, "metric": "pooled/accuracy"}))
