"""Actors without memory: another try on a fresh one, the same bits, and after the last try what to do about it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, OutOfMemoryError, RayTaskError

from actors import errors
from actors.driver import final_error
from actors.errors import ClusterError
from actors.placement import Placement
from actors.ray_executor import PendingCalls, RayExecutor
from jobs import single as running
from jobs.single import resume, run
from rayfl.compress.base import Message
from rayfl.errors import SMALLER, ClientError
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Carry, Context
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.record import read_run
from rayfl.tree import State
from tests.actors.toys import assert_same_bits, assert_same_run, experiment, logged, played, with_method
from tests.refusals import check_sentence, refused

ERRORS = {
    "memory": MemoryError("boom"),
    "cuda": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual."),
}
ADVICE = ("rayfl resume DIR --actors N", "runtime.num_gpus", SMALLER)


class Starving(FedAvg):
    """The process that works on client 1 in round 1 runs out of memory, `times` times."""

    folder: Path
    lack = "memory"
    times = 1

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        if ctx.round == 1 and ctx.traits.id == 1 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            if self.lack == "torch":
                torch.empty(1 << 50)
            if self.lack == "numpy":
                np.zeros(1 << 50)
            raise ERRORS[self.lack]
        return super().begin(state, received, ctx)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", ["memory", "cuda", "torch", "numpy"])
def test_a_fresh_actor_tries_again_and_changes_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = with_method(Starving, folder=tmp_path, times=0)
    records, run_state = played(undisturbed, InlineExecutor(undisturbed))
    setup = with_method(Starving, folder=tmp_path, times=2, lack=kind)
    executor = RayExecutor(ray.put(setup), Placement(2, 1.0, 0.0))
    try:
        others, other = played(setup, executor)
        assert not {path.name for path in tmp_path.iterdir()} & {str(pid) for pid in executor.pids}
    finally:
        executor.close()
    said = logged(caplog)
    # Each try was a process of its own.
    assert len(list(tmp_path.iterdir())) == 2 and len(said) == 2
    for times, sentence in enumerate(said, start=2):
        check_sentence(sentence, ["round 1, client 1", "out of memory", f"try {times} of 4"])
    assert others == records
    assert_same_bits(run_state, other)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", ["memory", "cuda"])
def test_the_last_try_says_who_and_what_to_change_and_the_run_can_go_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment(checkpoint={"every": 1}, runtime={"actors": 1})
    hungry = with_method(Starving, folder=tmp_path, times=errors.TRIES["memory"], lack=kind)
    directory = tmp_path.parent / f"{tmp_path.name}-run"
    with monkeypatch.context() as patch, pytest.raises(ClientError) as raised:
        patch.setattr(running, "prepare", lambda *given: replace(prepare(*given), method=hungry.method))
        run(chosen, directory)
    cause = f"{type(ERRORS[kind]).__name__}: {ERRORS[kind]}".partition("\n")[0]
    check_sentence(str(raised.value), ["round 1, client 1", "out of memory", cause, "4 times", *ADVICE])
    assert len(read_run(directory).rounds) == 1
    resume(directory)
    assert_same_run(run(chosen, directory.with_name(f"{directory.name}-undisturbed")), directory)


def test_without_actors_the_sentence_says_what_is_left_to_change(tmp_path: Path) -> None:
    setup = with_method(Starving, folder=tmp_path)
    with refused(names=["round 1, client 1", "out of memory", "MemoryError: boom", SMALLER], error=ClientError):
        played(setup, InlineExecutor(setup))


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("times", [1, 9])
def test_what_rays_memory_monitor_kills_is_tried_again(
    times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The monitor itself acts on the whole machine's memory; here its error is what a call ends with.
    setup = prepare(experiment(rounds=2))
    records, _ = played(setup, InlineExecutor(setup))
    executor = RayExecutor(ray.put(setup), Placement(1, 1.0, 0.0))
    real, left = ray.get, [times]

    def killed(ref: Any, **settings: Any) -> Any:
        if ref in flying and left[0] > 0:
            left[0] -= 1
            raise OutOfMemoryError("Task was killed due to the node running low on memory.\nMany lines more.")
        return real(ref, **settings)

    flying: set[ray.ObjectRef] = set()
    take = RayExecutor._take

    def taken(self: RayExecutor, pending: PendingCalls, ref: ray.ObjectRef) -> None:
        flying.add(ref)
        take(self, pending, ref)

    monkeypatch.setattr(RayExecutor, "_take", taken)
    monkeypatch.setattr(ray, "get", killed)
    try:
        if times == 1:
            assert played(setup, executor)[0] == records
        else:
            with refused(names=["round 0", "clients", "out of memory", "4 times", ADVICE[0]], error=ClientError):
                played(setup, executor)
    finally:
        executor.close()
    said = logged(caplog)
    assert len(said) == min(times, 3) and "memory" in said[0]


@pytest.mark.parametrize(
    ("cause", "facts"),
    [
        (ObjectStoreFullError("full"), ["runtime.object_store_memory_mb"]),
        (OutOfDiskError("full"), ["OutOfDiskError", "full"]),
        (MemoryError("boom"), ["memory", "MemoryError: boom", "actors"]),
        (ClusterError("no actor was ready"), ["no actor was ready"]),
    ],
)
def test_a_coordinator_without_room_ends_in_one_sentence(cause: Exception, facts: list[str]) -> None:
    told = final_error(RayTaskError("run", "Traceback", cause), "rayfl resume DIR")
    assert isinstance(told, ClusterError) and str(told).count("rayfl resume DIR") == 1
    check_sentence(str(told), facts)


def test_other_errors_of_a_coordinator_stay_what_they_are() -> None:
    assert isinstance(final_error(RayTaskError("run", "Traceback", KeyError("w")), "rayfl resume DIR"), KeyError)
