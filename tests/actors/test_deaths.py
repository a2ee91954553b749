"""How many deaths a run bears: as many as it likes while it gets further, ten where it does not."""

import gc
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from actors import driver, errors, ray_internals, supervision
from actors.coordinator import Progress, RunSpec
from actors.errors import TRIES, Cause, ClusterError
from actors.placement import Placement
from actors.ray_executor import Call, RayExecutor
from benchmarks.client_actors import client_actors
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.executor import Job
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.worker_jobs import EvaluateJob, RoundInputs
from rayfl.run_directory.play_run import Listener
from tests.actors.toys import experiment, logged, play_on_ray
from tests.refusals import check_sentence, refused


class Handle:
    """Stands in for a coordinator's handle: it plays one round, and dies unless it is the last of `lives`."""

    def __init__(self, run: Callable[[Any], Progress], ends: bool) -> None:
        self.told: list[Progress] = []
        self.variables: dict[str, str] = {}

        # Any: what a coordinator is given.
        def begin(setup: Any, spec: Any, variables: Any) -> ray.ObjectRef:
            self.variables = variables
            self.told = [run(spec)] + [Progress([], over=True)] * ends
            return ray.put(True)

        def progress(*known: Any) -> ray.ObjectRef:
            if not self.told:
                # As ray.get does, whose frame holds the error.
                death = RayError("the actor died.\nSee its logs.")
                raise death
            return ray.put(self.told.pop(0))

        self.run, self.progress = SimpleNamespace(remote=begin), SimpleNamespace(remote=progress)
        self.stop = SimpleNamespace(remote=lambda: None)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Handle]], None]:
    """Let the driver start such coordinators."""
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    return lambda make: monkeypatch.setattr(driver, "_start_coordinator", make)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("forward", "lives"), [(0, TRIES["coordinator"]), (1, 25)])
def test_coordinators_that_die(
    forward: int, lives: int, tmp_path: Path, handles: Any, caplog: pytest.LogCaptureFixture
) -> None:
    resumed: list[bool] = []

    def run(spec: RunSpec) -> Progress:
        resumed.append(spec.output.resumed)
        return Progress([(RoundRow(forward * len(resumed), 1, 1, 0, 0, 1.0, 0.1), {})], over=False)

    chosen = experiment(rounds=50)
    handles(lambda: Handle(run, ends=len(resumed) == 24))

    def play() -> bool:
        return play_on_ray(chosen, prepare(chosen), tmp_path, Listener())

    if forward:
        assert play()
        for sentence in logged(caplog):
            check_sentence(sentence, ["try 2 of 10"])
    else:
        with refused(names=["10", f"rayfl resume {tmp_path}", "the actor died. See its logs."], error=ClusterError):
            play()
    assert resumed == [False] + [True] * (lives - 1)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_death_of_a_coordinator_leaves_no_references(tmp_path: Path, handles: Any) -> None:
    lives: list[bool] = []

    def run(spec: RunSpec) -> Progress:
        lives.append(spec.output.resumed)
        return Progress([(RoundRow(len(lives), 1, 1, 0, 0, 1.0, 0.1), {})], over=False)

    handles(lambda: Handle(run, ends=len(lives) == 2))
    chosen = experiment()
    setup = prepare(chosen)
    gc.collect()
    before = len(ray_internals.known_objects())
    gc.disable()
    try:
        assert play_on_ray(chosen, setup, tmp_path, Listener()) and lives == [False, True, True]
        assert len(ray_internals.known_objects()) == before
    finally:
        gc.enable()


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_coordinator_that_dies_after_a_signal_is_the_last_one(tmp_path: Path, handles: Any) -> None:
    lives: list[int] = []

    def run(spec: RunSpec) -> Progress:
        lives.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        return Progress([(RoundRow(0, 1, 1, 0, 0, 1.0, 0.1), {})], over=False)

    handles(lambda: Handle(run, ends=False))
    chosen = experiment()
    assert play_on_ray(chosen, prepare(chosen), tmp_path, Listener()) is False
    assert len(lives) == 1


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_run_that_ends_without_news_is_over(tmp_path: Path, handles: Any) -> None:
    handles(lambda: Handle(lambda spec: Progress([], over=False), ends=True))
    chosen, rounds = experiment(), list[int]()
    listener = Listener(lambda row, means: rounds.append(row.round))
    assert play_on_ray(chosen, prepare(chosen), tmp_path, listener) and not rounds


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_keys_of_accounts_travel_beside_what_lies_in_the_object_store(
    tmp_path: Path, handles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    monkeypatch.setattr("rayfl.experiment.prepare.require_installed", lambda names: None)
    specs: list[bytes] = []

    def run(spec: RunSpec) -> Progress:
        specs.append(pickle.dumps(spec))
        return Progress([], over=False)

    handle = Handle(run, ends=True)
    handles(lambda: handle)
    chosen = experiment(output={"track": ["wandb"]})
    assert play_on_ray(chosen, prepare(chosen), tmp_path, Listener())
    assert len(specs) == 1 and b"a-secret-key" not in specs[0]
    assert handle.variables["WANDB_API_KEY"] == "a-secret-key"
    assert len(pickle.dumps(handle.variables)) < 8192


def test_a_signal_stops_what_is_inside_and_what_is_around_it() -> None:
    stops: list[str] = []
    with supervision.stoppable(lambda: stops.append("outer")):
        with supervision.stoppable(lambda: stops.append("inner")):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stops == ["inner", "outer"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_deaths_of_idle_actors_are_not_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors.TRIES, "death", 2)
    setup = prepare(experiment())
    with client_actors(setup, Runtime(actors=3)) as executor:
        before = set(executor.pids)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        (done,) = executor.run(executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))])
        assert done.result == () and not before & set(executor.pids)


CAUSES: tuple[Cause, ...] = ("memory", "time", "death")


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_every_cause_is_counted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(experiment())
    with client_actors(setup, Runtime(actors=1)) as executor:
        monkeypatch.setattr(executor.pool, "start", lambda: None)
        call = Call(0, executor.pool.idle.pop(), [], 0.0)
        pending = executor._pending(executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))])
        for times in range(1, 5):
            for cause in CAUSES:
                executor._replace_and_send_again(pending, call, "a reason", cause)
                assert bool(pending.failed) == (times == 4)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_cluster_with_room_for_some_actors_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    # The tests' cluster has four cores: room for one actor of three, and for its successor when it is gone.
    setup = prepare(experiment())
    executor = RayExecutor(ray.put(setup), Placement(2, 3.0, 0.0, start_timeout_s=15.0))
    try:
        (first,) = executor.pids
        check_sentence(logged(caplog)[0], ["1 of 2", "num_cpus=3", "num_gpus=0"])
        shared = executor.put(RoundInputs(0, setup.plan(0)))
        assert executor.run(shared, [Job(EvaluateJob(()))] * 3)[0].result == ()
        os.kill(first, signal.SIGKILL)
        assert executor.run(shared, [Job(EvaluateJob(()))] * 3)[2].result == ()
        assert first not in executor.pids
    finally:
        executor.close()


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_actors_that_die_as_they_start_are_replaced_nine_times(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, starts = prepare(experiment()), list[int]()
    with client_actors(setup, Runtime(actors=1)) as executor:
        monkeypatch.setattr(executor.pool, "start", lambda: starts.append(1))
        (dead,) = executor.pool.ready
        ray.kill(dead)
        with refused(names=["10 client actors", "--actors"], error=ClusterError):
            while True:
                joined = dead.join.remote([executor.pool._setup])
                executor.pool._starting[joined] = dead
                executor.pool._admit(joined)
    assert len(starts) == TRIES["start"] - 1
