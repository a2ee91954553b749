"""Robust means on Ray's actors: the bits of one process."""

from pathlib import Path

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.rounds import aggregation
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from tests.actors.toys import assert_same_run, experiment, play_on_ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def test_robust_means_on_actors_have_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aggregation, "ENTRIES", 9000)
    chosen = experiment(
        rounds=2,
        wrap=["centered-clipping", {"name": "attack", "kind": "gaussian"}],
        method={"name": "fedavg", "lr": 0.1, "batch_size": 16, "weighting": "uniform"},
        runtime={"actors": 2},
    )
    setup = prepare(chosen)
    for name in ("ray", "inline"):
        (tmp_path / name).mkdir()
    assert play_on_ray(chosen, setup, tmp_path / "ray", Listener())
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "inline"))
    assert_same_run(tmp_path / "ray", tmp_path / "inline")
