"""runtime.limit_s ends a command after the round under way, so that it can be resumed."""

from pathlib import Path

import pytest

import rayfl as from_python
from jobs import console
from jobs.failures import LIMIT
from rayfl.run_directory.record import read_run
from tests.actors.toys import assert_same_run
from tests.jobs.commands import rayfl
from tests.refusals import refused

EXPERIMENT = """
rounds = 4
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 3}
method = {name = "fedavg", lr = 0.1}
output = {report = false}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    return tmp_path / "small.toml"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes 10 seconds by the clock of the limit, which pass as its line is printed, after it is recorded."""
    seconds = [0.0]
    told = console.line

    def line(*arguments: object) -> str:
        seconds[0] += 10
        return told(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(console, "line", line)
    monkeypatch.setattr("jobs.console.time.monotonic", lambda: seconds[0])


@pytest.mark.usefixtures("clock")
def test_a_run_ends_after_the_round_under_way_and_goes_on_by_the_same_command(file: Path) -> None:
    assert rayfl("run", file, "--inline", "--output", "whole").exit_code == 0
    command = ("run", file, "--inline", "--output", "cut", "--resume", "runtime.limit_s=15")
    found = rayfl(*command)
    assert found.exit_code == LIMIT == 75, found.output
    assert "runtime.limit_s=15 after 3 of 4 rounds" in found.output and "rayfl resume" in found.output
    assert len(read_run(Path("cut")).rounds) == 3
    last = rayfl("resume", "cut", "runtime.limit_s=1000")
    assert last.exit_code == 0, last.output
    assert_same_run(Path("whole"), Path("cut"))


@pytest.mark.usefixtures("clock")
def test_a_sweep_has_one_limit(file: Path) -> None:
    command = ("sweep", file, "--inline", "--dir", "swept", "sweep.seed=[1, 2, 3]", "runtime.limit_s=55")
    found = rayfl(*command)
    assert found.exit_code == LIMIT, found.output
    assert "runtime.limit_s=55 with 1 of 3 runs finished" in found.output and "--dir" in found.output
    assert rayfl(*command, "runtime.limit_s=1000").exit_code == 0


@pytest.mark.slow
def test_runs_at_once_end_at_the_limit_of_their_sweep(file: Path) -> None:
    """Each of the two processes has what is left of the limit, records a round at least, and the third never begins."""
    command = ("sweep", file, "--inline", "--dir", "swept", "--parallel", 2, "sweep.seed=[1, 2, 3]", "rounds=100000")
    found = rayfl(*command, "runtime.limit_s=6")
    assert found.exit_code == LIMIT, found.output
    assert "runtime.limit_s=6 with 0 of 3 runs finished" in found.output
    runs = [read_run(path) for path in sorted(Path("swept").iterdir()) if path.is_dir()]
    assert len(runs) == 2 and all(1 <= len(run.rounds) < 100000 and not run.finished for run in runs)


def test_from_python_the_results_are_partial(file: Path) -> None:
    settings = {"executor": "inline", "limit_s": 1e-6}
    found = from_python.run(str(file), runtime=settings, progress=False, directory="cut")
    assert len(found.rounds) == 1 and not found.finished
    with refused(names=["runtime.limit_s", "0"]):
        from_python.run(str(file), runtime={"limit_s": 0})


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_on_ray_it_ends_during_a_round(file: Path) -> None:
    found = rayfl("run", file, "--output", "cut", "--rounds", 100000, "--actors", 1, "runtime.limit_s=3")
    assert found.exit_code == LIMIT, found.output
    assert 1 <= len(read_run(Path("cut")).rounds) < 100000
