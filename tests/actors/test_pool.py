"""RayExecutor: the same bits as in one process, whoever did the work, in whatever order, and whoever died."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import errors
from actors.errors import ClusterError
from actors.placement import Machines, Placement, Verdict
from actors.ray_executor import PendingCalls, RayExecutor
from benchmarks.client_actors import client_actors
from rayfl.compress.base import Message
from rayfl.determinism import platform
from rayfl.determinism.platform import Platform
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import ClientError
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.gather import Handle
from rayfl.methods.base import Carry, Context
from rayfl.methods.server.fedavg import FedAvg
from rayfl.population.client import ClientStatus
from rayfl.rounds import downlinks
from rayfl.rounds.executor import InlineExecutor, Job
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.worker_jobs import EvaluateJob, PooledJob, RoundInputs, TrainJob
from rayfl.tree import State
from tests.actors.toys import Failing, Fatal, assert_same_bits, experiment, logged, played, with_method
from tests.refusals import check_sentence, mentions, refused

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("method", ["fedavg", "fedpse", "local"])
def test_three_actors_give_the_bits_of_one_process(method: str) -> None:
    setup = prepare(experiment(method))
    records, run_state = played(setup, InlineExecutor(setup))
    with client_actors(setup, Runtime(actors=3)) as executor:
        assert executor.num_workers == 3 and len(set(executor.pids)) == 3
        others, other = played(setup, executor)
    assert others == records
    assert_same_bits(run_state, other)


def uploads(first: int, *clients: int) -> TrainJob:
    """Clients who all deliver, from the leaf `first` on."""
    return TrainJob(((first, first + len(clients)),), dict.fromkeys(clients, ClientStatus.DELIVERED))


class Watched(RayExecutor):
    """Notes in which order jobs finish, and makes the file `first` when the first one has."""

    def __init__(self, *args: Any, first: Path | None = None) -> None:
        self.finished: list[int] = []
        self.first = first
        super().__init__(*args)

    def _take(self, pending: PendingCalls, ref: ray.ObjectRef) -> None:
        self.finished.append(pending.sent[ref].index)
        super()._take(pending, ref)
        if self.first:
            self.first.touch()


def test_results_come_in_the_order_of_the_jobs_and_not_of_their_completion() -> None:
    # The first job trains every client, each of the others one: two actors end the others first.
    setup = prepare(experiment(method={"name": "fedavg", "epochs": 20, "batch_size": 4}))
    plan = setup.plan(0)
    message = downlinks.broadcast(setup, {"params": setup.initial}, {}, setup.context(0, plan, NOBODY, "server"))[0]
    works = [uploads(0, *range(10)), *(uploads(i, i) for i in range(4))]
    executor = Watched(ray.put(setup), Placement(2, 1.0, 0.0))
    try:
        done = executor.run(executor.put(RoundInputs(0, plan, message)), [Job(work) for work in works])
    finally:
        executor.close()
    assert sorted(executor.finished) == [0, 1, 2, 3, 4] and executor.finished[-1] == 0
    clients = [[one.client for one in answer.result] for answer in done]
    assert clients == [list(range(10)), [0], [1], [2], [3]]


def test_an_actor_killed_during_a_call_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The file exists already in the first run, so nobody is killed there.
    reached = tmp_path / "reached"
    reached.touch()
    undisturbed = with_method(Fatal, killed=reached)
    records, run_state = played(undisturbed, InlineExecutor(undisturbed))
    setup = with_method(Fatal, killed=tmp_path / "killed")
    executor = RayExecutor(ray.put(setup), Placement(2, 1.0, 0.0))
    try:
        before = set(executor.pids)
        others, other = played(setup, executor)
        assert (tmp_path / "killed").exists()
        assert len(before & set(executor.pids)) == 1
    finally:
        executor.close()
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["round 1", "train", "clients", "try 2 of 10"])
    assert others == records
    assert_same_bits(run_state, other)


class Odd(Machines):
    """Takes the first `count` actors for machines of another kind."""

    count = 1

    def admit(self, found: Platform, address: str) -> Verdict:
        self.count -= 1
        return super().admit({**found, "cpu": "odd"} if self.count >= 0 else found, address)


def test_an_odd_machine_is_left_aside_and_a_run_without_another_ends_in_its_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = prepare(experiment())
    written: list[Platform] = []
    machines = Odd({}, resume="rayfl resume DIR")
    executor = RayExecutor(ray.put(setup), Placement(2, 1.0, 0.0), machines, written.append)
    try:
        # Another actor would have to start elsewhere, and there is no other node.
        assert len(executor.pids) == 1 and len(executor.pool._starting) == 1
        assert written == [platform.describe(1)]
        assert played(setup, executor)[0] == played(setup, InlineExecutor(setup))[0]
    finally:
        executor.close()
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["node", f"cpu={written[0]['cpu']}", "cpu=odd"])
    machines = Odd(written[0], resume="rayfl resume DIR")
    machines.count = 2
    with refused(names=["cpu=odd", "rayfl resume DIR", "runtime.mixed=true"], error=ClusterError):
        RayExecutor(ray.put(setup), Placement(2, 1.0, 0.0), machines, written.append)
    assert len(written) == 1


class Hanging(FedAvg):
    """The first call that reaches client 1 never answers."""

    hung: Path | None = None

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        if ctx.traits.id == 1 and self.hung and not self.hung.exists():
            self.hung.write_text(str(os.getpid()))
            time.sleep(3600)
        return super().begin(state, received, ctx)


def test_an_actor_that_does_not_answer_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = with_method(Hanging)
    records, run_state = played(undisturbed, InlineExecutor(undisturbed))
    setup = with_method(Hanging, hung=tmp_path / "hung")
    executor = RayExecutor(ray.put(setup), Placement(2, 1.0, 0.0, call_timeout_s=10.0))
    try:
        before = set(executor.pids)
        others, other = played(setup, executor)
        hung = int((tmp_path / "hung").read_text())
        assert hung in before and hung not in executor.pids
        # The new one may still be starting, as the other actor holds nobody up.
        assert len(executor.pids) + len(executor.pool._starting) == 2
    finally:
        executor.close()
    # A process that has been killed and not yet been waited for is a zombie, of which nothing is left but its number.
    status = Path(f"/proc/{hung}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
    # On a machine that is busy enough other calls may be late too.
    assert any(str(hung) in sentence and "call_timeout_s=10" in sentence for sentence in logged(caplog))
    assert others == records
    assert_same_bits(run_state, other)


def test_a_replacement_for_which_there_is_no_room_holds_nobody_up() -> None:
    setup = prepare(experiment(rounds=2))
    records, run_state = played(setup, InlineExecutor(setup))
    executor = RayExecutor(ray.put(setup), Placement(2, 2.0, 0.0, start_timeout_s=60.0))
    # The cluster has 4 cores. Whoever asks for the dead actor's two first gets them.
    try:
        victim, _ = executor.pool.ready
        ray.kill(victim)
        executor.pool.placement = replace(executor.pool.placement, num_cpus=4.0, start_timeout_s=0.1)
        others, other = played(setup, executor)
        assert len(executor.pids) == 1
    finally:
        executor.close()
    assert others == records
    assert_same_bits(run_state, other)


def test_an_idle_actor_that_is_killed_is_replaced() -> None:
    setup = prepare(experiment("fedpse"))
    records, run_state = played(setup, InlineExecutor(setup))
    others = []
    with client_actors(setup, Runtime(actors=1)) as executor:
        (victim,) = executor.pids

        def kill_after_first(record: Any, run_state: RunState) -> None:
            others.append(record)
            if record.row.round == 0:
                os.kill(victim, signal.SIGKILL)

        other = simulate(setup, executor, kill_after_first)
        assert [replace(record.row, wall_s=0.0) for record in others] == [record.row for record in records]
        assert victim not in executor.pids
        assert executor.get(other.states[0])["base"].keys() == run_state.states[0]["base"].keys()


def test_a_call_that_kills_every_actor_ends_the_run_with_its_round_and_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors.TRIES, "death", 2)
    setup = with_method(Fatal)
    with (
        client_actors(setup, Runtime(actors=1)) as executor,
        # Ray's own reason makes the sentence long.
        pytest.raises(ClientError) as raised,
    ):
        played(setup, executor)
    assert all(mentions(str(raised.value), fact) for fact in ("round 1", "train", "clients", "2 tries"))


def test_an_error_of_a_client_names_round_and_client_and_is_the_first_ones() -> None:
    setup = with_method(Failing)
    with pytest.raises(ClientError) as inline:
        played(setup, InlineExecutor(setup))
    with client_actors(setup, Runtime(actors=3)) as executor:
        with pytest.raises(ClientError) as raised:
            played(setup, executor)
        # The pool is as good as before.
        assert len(executor.pids) == 3
        assert executor.run(executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))])[0].result == ()
    first = min(client for client in setup.population.sample_round(2).selected if client >= 3)
    assert str(raised.value) == str(inline.value)
    error = f"ZeroDivisionError: client {first} divides by zero"
    check_sentence(str(raised.value), [f"round 2, client {first}", "Failing.begin", "toys.py", error])
    assert "in begin" in raised.value.__notes__[0]


def test_of_two_errors_the_one_of_the_first_job_is_told(tmp_path: Path) -> None:
    # The second job fails at its first client, client 4; only when that is known does the first one, at client 3.
    setup = with_method(Failing, after=tmp_path / "failed")
    plan = setup.plan(2)
    message = downlinks.broadcast(setup, {"params": setup.initial}, {}, setup.context(2, plan, NOBODY, "server"))[0]
    jobs = [Job(work) for work in (uploads(0, 0, 1, 2, 3), uploads(4, 4), uploads(5, 0))]
    executor = Watched(ray.put(setup), Placement(2, 1.0, 0.0), first=tmp_path / "failed")
    try:
        with refused(names=["round 2", "client 3"], error=ClientError):
            executor.run(executor.put(RoundInputs(2, plan, message)), jobs)
    finally:
        executor.close()
    # Both were waited for, and the third job was never sent.
    assert executor.finished == [1, 0]


def test_an_error_outside_a_clients_own_code_names_the_round_too() -> None:
    setup = prepare(experiment())
    with (
        client_actors(setup, Runtime(actors=1)) as executor,
        refused(names=["round 7", "pooled", "AssertionError"], error=ClientError),
    ):
        # No model was put into what the job shares.
        executor.run(executor.put(RoundInputs(7, setup.plan(7))), [Job(PooledJob(0, 1))])


@ray.remote(num_cpus=0)
def size_of(handle: Handle) -> int:
    """A packet's size, read in another process."""
    return handle.open().num_bits


def test_a_packet_that_is_relayed_is_opened_where_it_is_read() -> None:
    setup = prepare(experiment())
    message = downlinks.broadcast(
        setup, {"params": setup.initial}, {}, setup.context(0, setup.plan(0), NOBODY, "server")
    )[0]
    with client_actors(setup, Runtime(actors=1)) as executor:
        handle = executor.handle(executor.put(message["model"]))
        read = ray.get(size_of.remote(handle), timeout=30)
    assert read == message["model"].num_bits


def test_quarters_of_a_gpu_start_and_a_fifth_one_is_late() -> None:
    setup = prepare(experiment())
    with client_actors(setup, Runtime(actors=4, num_gpus=0.25, num_cpus=0.5, device="cpu")) as executor:
        assert len(executor.pids) == 4
        with refused(names=["0 of 1", "runtime.start_timeout_s=0.5"], error=ClusterError):
            RayExecutor(ray.put(setup), Placement(1, 0.5, 0.25, start_timeout_s=0.5))


def test_a_gpu_that_ray_counts_and_torch_does_not_see_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a GPU: give the case with one its own test")
    setup = prepare(experiment(runtime={"num_gpus": 0.25}))
    with (
        refused(names=["device='cuda'", "runtime.device='cpu'"]),
        client_actors(setup, Runtime(actors=1, num_gpus=0.25)),
    ):
        raise AssertionError("an actor without a GPU must not start")
