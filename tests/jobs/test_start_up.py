"""What a command does not load, and what a run loads only when its first round is over."""

import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.node import Node

from actors import session
from rayfl import data, methods, models, topology
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.tracking import Tracking
from tests.jobs.commands import rayfl

ROOT = Path(__file__).resolve().parents[2]
DRAWS = {"vl_convert", "pandas", "torchvision", "tensorboard", "wandb", "jinja2"}


CHOSEN_BY_NAME = ", ".join(
    module.name
    for package in (data, methods, models, topology)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)
"""Every run loads these, to know all names."""

NEEDED_FIRST = [
    ("jobs.cli", {"torch", "ray", "numpy", "pyarrow", "pydantic", *DRAWS}),
    ("rayfl.settings", {"torch", "ray", "numpy", "pyarrow", *DRAWS}),
    ("rayfl.experiment.table, jobs.failures", {"torch", "ray", *DRAWS}),
    ("jobs.catalogue, rayfl.experiment.experiment", {"ray", *DRAWS}),
    ("rayfl.rounds.worker, rayfl.run_directory.play_run", {"ray", *DRAWS}),
    (CHOSEN_BY_NAME, {"ray", *DRAWS}),
    ("jobs.single, actors.client, actors.coordinator", DRAWS),
]
"""What is imported one after the other in one process, and what may not be loaded by then."""


def test_what_is_not_needed_is_not_loaded():
    looks = [
        f"import {modules}\nprint({modules!r}, *({absent!r} & set(sys.modules)))" for modules, absent in NEEDED_FIRST
    ]
    program = "\n".join(["import sys", *looks])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines() == [modules for modules, _ in NEEDED_FIRST]


@pytest.mark.slow
def test_a_run_loads_no_compiler(tmp_path: Path):
    program = (
        "import rayfl, sys\n"
        "rayfl.run(data='digits', partition='iid', clients={'count': 2}, model='logistic', method='fedavg', rounds=1,\n"
        f"    runtime={{'executor': 'inline'}}, directory={str(tmp_path / 'run')!r}, progress=False)\n"
        "print(*({'torch._inductor', 'torch._dynamo'} & set(sys.modules)), 'over')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "over"


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A run's directory without rounds."""
    (tmp_path / "file.toml").write_text(
        'rounds = 1\ndata = "digits"\npartition = "iid"\nclients = {count = 2}\nmodel = "logistic"\nmethod = "fedavg"\n'
        "output = {report = false}\n"
    )
    run = tmp_path / "run"
    assert rayfl("run", tmp_path / "file.toml", "--inline", "--output", run).exit_code == 0
    return run


def test_trackers_begin_with_the_first_round_that_is_over(described: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []

    class Fake:
        def __init__(self, run: object, num_recorded: int) -> None:
            begun.append("begin")

        def round(self, round: int, values: object) -> None:
            begun.append(f"round {round}")

        def close(self, finished: bool) -> None:
            begun.append(f"finished {finished}")

    monkeypatch.setattr("rayfl.run_directory.trackers.tensorboard_events.TensorBoard", Fake)
    row = RoundRow(**read_row(described))
    with Tracking(described, ("tensorboard",)) as tracking:
        assert begun == []
        tracking.round(row, {})
        assert begun == ["begin", "round 0"]
    assert begun[2:] == ["finished True"]


# Any: what a table holds.
def read_row(directory: Path) -> dict[str, Any]:
    from rayfl.run_directory.record import read_records

    return read_records(directory, "rounds").to_pylist()[0]


def test_a_ray_of_our_own_starts_no_process_without_work(monkeypatch: pytest.MonkeyPatch):
    skipped = {
        name: getattr(Node, name) for name in ("start_api_server", "start_log_monitor", "start_monitor", "start_raylet")
    }
    found: list[object] = []

    def init(**settings: object) -> None:
        node = object.__new__(Node)
        found.append(node.start_api_server(include_dashboard=False, raise_on_failure=False))
        found.extend([node.start_log_monitor(), node.start_monitor()])
        raise RuntimeError

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(RuntimeError):
        session._init(None)
    assert found == [None, None, None]
    # Also after an error Ray is what it was.
    assert {name: getattr(Node, name) for name in skipped} == skipped
