"""Experiments of classes, methods and arrays, given from Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.single import resume, run
from rayfl.choices.kinds import named
from rayfl.compress.sparse import TopK
from rayfl.data.sources.arrays import Arrays
from rayfl.experiment.experiment import Experiment
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.scaffold import Scaffold
from rayfl.run_directory.record import read_run
from rayfl.wrappers.elastic import Elastic
from tests.actors.toys import assert_same_run
from tests.refusals import line_with, refused

GENERATOR = np.random.default_rng(1)


class Net(torch.nn.Sequential):
    """A model that can be imported."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, num_classes))


class Mine(FedAvg):
    """A method that can be imported."""

    paper = "None"


def experiment(**tables: Any) -> Experiment:
    given: dict[str, Any] = {
        "rounds": 2,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 3},
        "model": Net,
        "method": Mine,
        "runtime": {"executor": "inline"},
        "checkpoint": {"every": 1},
        "output": {"report": False},
        **tables,
    }
    return Experiment(**given)


def test_what_can_be_imported_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    given = {"model": {"name": Net, "width": 3}, "method": Mine(lr=0.2), "uplink": TopK(keep_ratio=0.5)}
    run(experiment(**given, rounds=3), tmp_path / "long")
    run(experiment(**given), tmp_path / "short")
    assert caplog.messages == []
    written = read_run(tmp_path / "short").experiment
    assert written["method"]["name"] == f"{__name__}:Mine" and written["method"]["lr"] == 0.2  # type: ignore[index]
    resume(tmp_path / "short", ["rounds=3"])
    assert_same_run(tmp_path / "long", tmp_path / "short")


def test_what_cannot_be_imported_runs_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Local(Net):
        pass

    data = Arrays(GENERATOR.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2)
    run(experiment(model=Local, data=data, output={"report": True}), tmp_path / "run")
    for given in ("40 arrays", "Local"):
        line_with(caplog.messages, [given, "imported", "resumed"])
    assert read_run(tmp_path / "run").finished
    with refused(names=["40 arrays", "from Python", "imported"]):
        resume(tmp_path / "run", ["rounds=3"])


def test_a_method_without_a_task_is_its_name_and_its_settings():
    assert experiment(method=FedAvg(lr=0.1)).method == experiment(method={"name": "fedavg", "lr": 0.1}).method
    assert experiment(method=Scaffold(option="I")).method.to_table()["option"] == "I"
    with refused(names=["method", "Elastic", "wrap"]):
        experiment(method=Elastic(FedAvg(lr=0.1), tau=0.3))
    with refused(names=["unknown key 'rate'"]):
        FedAvg(rate=0.1)


def test_every_method_can_be_given_without_a_task():
    for name, kind in named(Method).items():
        tables = {"topology": "ring"} if kind.gather and issubclass(kind, PeerHalf) else {}
        assert experiment(method=kind(), **tables).method == experiment(method=name, **tables).method
