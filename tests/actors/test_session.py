"""A run through the coordinator: the run directory, progress, errors, signals, and a Ray of one's own."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.internal_api import memory_summary

import rayfl
from actors import session, supervision
from benchmarks.client_actors import client_actors
from rayfl.errors import ClientError
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.rounds import simulate
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from rayfl.run_directory.record import read_run
from tests.actors.toys import Failing, assert_same_run, experiment, logged, play_on_ray, with_method, write_experiment
from tests.refusals import check_sentence, refused

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("method", ["fedavg", "fedpse", "local"])
def test_one_actor_leaves_the_run_directory_of_one_process(method: str, tmp_path: Path) -> None:
    chosen = experiment(method, runtime={"actors": 1})
    setup = prepare(chosen)
    for name in ("ray", "inline"):
        (tmp_path / name).mkdir()
    rows: list[tuple[int, Mapping[str, float]]] = []
    finished = play_on_ray(
        chosen, setup, tmp_path / "ray", Listener(lambda row, means: rows.append((row.round, means)))
    )
    expected: list[tuple[int, Mapping[str, float]]] = []
    play_run(
        setup,
        InlineExecutor(setup),
        RunOutput(tmp_path / "inline"),
        Listener(lambda row, means: expected.append((row.round, means))),
    )
    assert finished and rows == expected
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


def test_what_the_coordinator_logs_is_logged_by_the_driver_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rayfl")
    chosen = experiment(rounds=1, runtime={"actors": 1})
    assert play_on_ray(chosen, prepare(chosen), write_experiment(tmp_path), Listener(), resumed=True)
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint", "round 0"])


def test_a_callback_that_has_enough_ends_the_run(tmp_path: Path) -> None:
    table: dict[str, Any] = experiment(rounds=500, runtime={"actors": 1}).as_dict() | {"output": {"report": False}}
    results = rayfl.run(directory=tmp_path / "run", progress=False, on_round=lambda one: one.planned == 500, **table)
    assert not results.finished and 1 <= len(results.rounds) < 500


def test_an_error_of_a_client_reaches_the_driver_as_one_sentence(tmp_path: Path) -> None:
    setup = with_method(Failing)
    facts = ["round 2, client 3", "Failing.begin", "toys.py", "ZeroDivisionError: client 3 divides by zero"]
    with refused(names=facts, error=ClientError) as raised:
        play_on_ray(experiment(runtime={"actors": 2}), setup, tmp_path, Listener())
    assert "in begin" in raised.value.__notes__[0]
    run = read_run(write_experiment(tmp_path))
    assert run.rounds["round"].to_pylist() == [0, 1] and not run.finished


def test_a_request_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    chosen = experiment(runtime={"actors": 5, "num_cpus": 1.0})
    with refused(names=["runtime.actors=5", "num_cpus=1", "holds 4"]):
        play_on_ray(chosen, prepare(chosen), tmp_path, Listener())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_current_round(number: int, tmp_path: Path) -> None:
    chosen = experiment(rounds=400, runtime={"actors": 1})
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    rounds: list[int] = []

    def interrupt(row: RoundRow, means: Mapping[str, float]) -> None:
        rounds.append(row.round)
        if row.round == 2:
            os.kill(os.getpid(), number)

    assert play_on_ray(chosen, prepare(chosen), tmp_path, Listener(interrupt)) is False
    run = read_run(write_experiment(tmp_path))
    assert 3 <= run.rounds.num_rows < 400 and not run.finished
    assert run.rounds["round"].to_pylist() == rounds
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_the_second_signal_does_not_wait() -> None:
    stops: list[str] = []
    with pytest.raises(KeyboardInterrupt), supervision.stoppable(lambda: stops.append("stop")):
        os.kill(os.getpid(), signal.SIGINT)
        assert stops == ["stop"]
        os.kill(os.getpid(), signal.SIGTERM)


def objects_in_store() -> int:
    """How many objects the local object store holds."""
    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)
    assert found is not None
    return int(found.group(1))


def test_old_states_leave_the_object_store() -> None:
    # A state is an MLP of 64-1000-10: 75,010 floats, 0.3 MB, too large for the coordinator's heap. In 8 rounds 10
    # clients make 80 states, of which 10 live on.
    setup = prepare(experiment("local", rounds=8, model={"name": "mlp", "hidden": [1000]}))
    with client_actors(setup, Runtime(actors=2)) as executor:
        before = objects_in_store()
        run_state = simulate(setup, executor, lambda record, run_state: None)
        assert len(run_state.states) == 10
        # Ray frees objects once a second. Beside the states, what the last calls shared may still be there; what
        # earlier tests left can only make `before` larger.
        deadline = time.monotonic() + 20
        while objects_in_store() > before + 14 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert objects_in_store() <= before + 14


PROGRAM = """
from rayfl.determinism.process import prepare_process
prepare_process()
import os
from pathlib import Path
import ray
from actors import session
from rayfl.run_directory.play_run import Listener
from benchmarks.victims import ACTOR, processes
from rayfl.experiment.prepare import prepare
from tests.actors.toys import experiment, play_on_ray

chosen = experiment(runtime={"actors": 2, "object_store_memory_mb": 100})
Path("run").mkdir()
with session.session(chosen.runtime):
    print([each for each in processes([os.getpid()]) if each.kind == ACTOR])
    played = play_on_ray(chosen, prepare(chosen), Path("run"), Listener(lambda row, means: print(row.round)))
print(played, ray.is_initialized())
"""


def test_a_local_ray_is_started_and_shut_down(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # No worker is there before one is needed: ray.init waits for those that Ray starts by itself, for ever if one dies.
    assert done.stdout.splitlines() == ["[]", "0", "1", "2", "3", "True False"], done.stderr
    assert done.stderr == ""
    assert read_run(write_experiment(tmp_path / "run")).finished


def test_a_driver_that_uses_ray_already_keeps_it() -> None:
    with session.session(Runtime(address="203.0.113.1:6379")):
        assert ray.is_initialized()
    assert ray.is_initialized()


def test_an_actor_may_lose_its_process_three_times_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    # Ray's docstring is what says which settings it takes.
    monkeypatch.setattr(ray, "init", functools.wraps(ray.init)(lambda **given: asked.update(given)))
    session._init(100)
    # Ray waits that long before it sees that a process died as it started.
    assert 4 * asked["_system_config"]["worker_register_timeout_seconds"] <= Runtime().start_timeout_s


UNREACHABLE = """
import sys
from actors import session
from rayfl.experiment.experiment import Runtime

for address in sys.argv[1:]:
    try:
        with session.session(Runtime(address=address)):
            pass
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
"""


def test_an_address_without_a_cluster_is_one_sentence() -> None:
    # A socket that is bound and does not listen: nothing answers there, and nobody else can take the port.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, address, "head", "ray://head:10001"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["ClusterError", "RayflError", "RayflError"], done.stderr
    for line, facts in zip(lines, ([address, "unset RAY_ADDRESS"], ["host:port"], ["ray job submit"]), strict=True):
        check_sentence(line, facts)
