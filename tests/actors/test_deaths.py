"""How many deaths a run bears: as many as it likes while it gets further, ten where it does not."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from actors import losses, pool, session
from actors.coordinator import Progress
from actors.errors import ClusterError
from actors.losses import TRIES, Cause
from actors.pending import Call
from actors.placement import Placement
from rayfl.experiment.experiment import Runtime
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import Job
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.worker_jobs import EvaluateJob, RoundInputs
from tests.actors.toys import experiment, logged


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("forward", "lives"), [(0, TRIES["coordinator"]), (1, 25)])
def test_coordinators_that_die(
    forward: int, lives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resumed: list[bool] = []

    # Any: what session._play_on_coordinator takes.
    def dying(coordinator: Any, setup: Any, spec: Any, on_round: Any, *others: Any) -> bool:
        resumed.append(spec.resumed)
        on_round(RoundRow(forward * len(resumed), 1, 1, 0, 0, 1.0, 0.1), {})
        if len(resumed) == 25:
            return True
        raise RayError("the actor died.\nSee its logs.")

    chosen = experiment(rounds=50)
    monkeypatch.setattr(session, "_coordinator", lambda runtime: None)
    monkeypatch.setattr(session, "_play_on_coordinator", dying)

    def play() -> bool:
        return session.play_on_ray(chosen, prepare(chosen), tmp_path, lambda row, means: None)

    if forward:
        assert play()
        assert {sentence.rpartition(", ")[2] for sentence in logged(caplog)} == {"try 2 of 10"}
    else:
        with pytest.raises(ClusterError) as raised:
            play()
        began = f"the coordinator died 10 times; go on with: rayfl resume {tmp_path} (the last time Ray said: "
        assert str(raised.value) == f"{began}the actor died. See its logs.)"
    assert resumed == [False] + [True] * (lives - 1)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_coordinator_that_dies_after_a_signal_is_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[int] = []

    # Any: what session._play_on_coordinator takes.
    def dying(*given: Any) -> bool:
        lives.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        raise RayError("the actor died")

    monkeypatch.setattr(session, "_coordinator", lambda runtime: Asked())
    monkeypatch.setattr(session, "_play_on_coordinator", dying)
    chosen = experiment()
    assert session.play_on_ray(chosen, prepare(chosen), tmp_path, lambda row, means: None) is False
    assert len(lives) == 1


class Asked:
    """Stands in for a coordinator's handle."""

    def __init__(self) -> None:
        self.stop = self

    def remote(self) -> None:
        """What a call of `stop` is."""


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_run_that_ends_without_a_word_is_over() -> None:
    class Silent(Asked):
        def __init__(self) -> None:
            self.progress = self

        # Any: what `progress` is told.
        def remote(self, *told: Any) -> ray.ObjectRef:
            return ray.put(Progress(started=False, rounds=[], records=[], over=False))

    told: list[str] = []
    session.follow(Silent(), ray.put(None), lambda: told.append("start"), lambda row, means: None)
    assert not told


def test_a_signal_stops_what_is_inside_and_what_is_around_it() -> None:
    stops: list[str] = []
    with session.interruptible(lambda: stops.append("outer")):
        with session.interruptible(lambda: stops.append("inner")):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stops == ["inner", "outer"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_deaths_of_idle_actors_are_not_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.TRIES, "death", 2)
    setup = prepare(experiment())
    with session.executor(setup, Runtime(actors=3)) as executor:
        before = set(executor.pids.values())
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        (done,) = executor.run(executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))])
        assert done.result == () and not before & set(executor.pids.values())


CAUSES: tuple[Cause, ...] = ("memory", "time", "death")


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_every_cause_is_counted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(experiment())
    with session.executor(setup, Runtime(actors=1)) as executor:
        monkeypatch.setattr(executor, "_start", lambda: None)
        call = Call(0, executor._idle.pop(), [], 0.0)
        pending = executor._pending(executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))])
        for times in range(1, 5):
            for cause in CAUSES:
                executor._lose(pending, call, "a reason", cause)
                assert bool(pending.failed) == (times == 4)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_cluster_with_room_for_some_actors_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    # The tests' cluster has four cores: room for one actor of three, and for its successor when it is gone.
    setup = prepare(experiment())
    executor = pool.RayExecutor(ray.put(setup), Placement(2, 3.0, 0.0, start_timeout_s=15.0))
    try:
        (first,) = executor.pids.values()
        assert logged(caplog)[0].startswith("1 of 2 client actors (num_cpus=3, num_gpus=0 each) were ready within ")
        shared = executor.put(RoundInputs(0, setup.plan(0)))
        assert executor.run(shared, [Job(EvaluateJob(()))] * 3)[0].result == ()
        os.kill(first, signal.SIGKILL)
        assert executor.run(shared, [Job(EvaluateJob(()))] * 3)[2].result == ()
        assert first not in executor.pids.values()
    finally:
        executor.close()


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_actors_that_die_as_they_start_are_replaced_nine_times(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, starts = prepare(experiment()), list[int]()
    with session.executor(setup, Runtime(actors=1)) as executor:
        monkeypatch.setattr(executor, "_start", lambda: starts.append(1))
        (dead,) = executor.pids
        ray.kill(dead)
        with pytest.raises(ClusterError, match=r"^10 client actors died while they started; if memory ran out"):
            while True:
                joined = dead.join.remote([executor._setup])
                executor._starting[joined] = pool.Starting(dead, math.inf)
                executor._welcome(joined)
    assert len(starts) == TRIES["start"] - 1
