"""A run from the driver's side: start Ray or join a cluster, let a coordinator play, follow it, clean up.

No signature here has a type of Ray's, so that jobs need not know Ray.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import access, fork_server, heap, supervisor
from actors.client import Actor
from actors.coordinator import Coordinator, Progress, RunSpec
from actors.errors import ClusterError, final_error
from actors.lean_node import lean_node
from actors.losses import Loss, Setbacks, decide
from actors.placement import Placement, nodes, place, require_room_here, share
from actors.pool import RayExecutor
from actors.setups import put_setup
from rayfl.determinism.platform import Platform
from rayfl.determinism.process import trim
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment, Runtime
from rayfl.experiment.input_files import KeptFiles
from rayfl.rounds.executor import OnWave
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.setup import Setup
from rayfl.run_directory.trackers.tracker import environment

log = logging.getLogger("rayfl")

POLL_S = 1.0
"""Seconds between looks for a signal during a round. The end of a round is reported at once."""

_REACH_S = 5.0
"""Seconds in which a cluster's head must take a connection."""

_TWICE_S = 0.2
"""Seconds in which the same signal is the same request: sent to a group of processes, it comes from the parent, too."""

OnRound = Callable[[RoundRow, Mapping[str, float]], None]


def play_on_ray(
    experiment: Experiment,
    setup: Setup,
    directory: Path,
    on_round: OnRound,
    on_start: Callable[[Placement], None] = lambda placement: None,
    resumed: bool = False,
    files: KeptFiles | None = None,
    driver: Platform | None = None,
    stopping: Callable[[], bool] = lambda: False,
    on_wave: OnWave = lambda wave: None,
    on_stop: Callable[[], object] = lambda: None,
) -> bool:
    """Play an experiment on Ray into `directory`. True if all rounds were played, False if a signal ended the run.

    `files` (the experiment's table and what it names) and `driver` (what this process is) are written with what the
    actors are. `resumed`: go on where the run in `directory` was cut. `on_start` is called once the actors are ready,
    `on_round` with every round's row and means, `on_wave` once a second with how far the round is, `on_stop` by the
    first signal. What was lost, and how the run goes on, is logged. The first SIGINT or
    SIGTERM ends the run after the current round, the second one at once; it can be resumed either way. `stopping` is
    asked after every round; where it says so, the run ends as by a first signal. RayflError if the cluster cannot
    hold the actors; ClientError if a client's code fails; ClusterError if Ray does.
    """
    resume = f"rayfl resume {directory}"
    with session(experiment.runtime, setup):
        if experiment.runtime.cluster and heap.overflows(setup):
            log.warning(heap.ADVICE)
        placement = placed(experiment.runtime, setup)
        for sentence in placement.notices:
            log.warning(sentence)
        spec = RunSpec(
            placement,
            directory.absolute(),
            experiment.output.save_models,
            experiment.checkpoint,
            resumed,
            driver or {},
            files,
            experiment.output.track,
            environment(experiment.output.track),
        )
        reference = put_setup(setup)
        # What reading and cutting up the data took; the driver only follows the run from here on.
        trim()
        setbacks, reached, asked = Setbacks(), -1, False
        coordinator: Actor | None = None

        def report_round(row: RoundRow, means: Mapping[str, float]) -> None:
            nonlocal reached
            reached = row.round
            on_round(row, means)
            if stopping():
                stop()

        def stop() -> None:
            nonlocal asked
            if not asked:
                on_stop()
            asked = True
            if coordinator is not None:
                coordinator.stop.remote()

        with interruptible(stop):
            while True:
                coordinator = _coordinator(experiment.runtime)
                if asked:
                    stop()
                try:
                    return _play_on_coordinator(
                        coordinator, reference, spec, report_round, lambda: on_start(placement), on_wave
                    )
                except RayTaskError as error:
                    raise final_error(error, resume) from None
                except RayError as error:
                    if asked:
                        return False
                    reason = " ".join(str(error).split())
                    decision = decide(Loss("coordinator", setbacks.add(reached), reason, resume))
                    if not decision.again:
                        raise ClusterError(decision.sentence) from error
                    log.warning(decision.sentence)
                    spec = replace(spec, resumed=True)


def _coordinator(runtime: Runtime) -> Actor:
    """A coordinator on this node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Coordinator.options(scheduling_strategy=here).remote(  # pyright: ignore[reportAttributeAccessIssue]
        runtime.instruction_set
    )


def _play_on_coordinator(
    coordinator: Actor,
    setup: ray.ObjectRef,
    spec: RunSpec,
    on_round: OnRound,
    on_start: Callable[[], None],
    on_wave: OnWave,
) -> bool:
    """Let a coordinator play, and follow it to the end. RayError if it dies."""
    try:
        over = coordinator.run.remote([setup], spec)
        follow(coordinator, over, on_start, on_round, on_wave)
        return ray.get(over)
    finally:
        ray.kill(coordinator)


def follow(
    coordinator: Actor,
    over: ray.ObjectRef,
    on_start: Callable[[], None],
    on_round: OnRound,
    on_wave: OnWave = lambda wave: None,
) -> None:
    """Report every round as it ends, and log what the coordinator logs, until `over`, the run's end, is there."""
    num_rounds, num_records, started = 0, 0, False
    while True:
        ended = bool(ray.wait([over], timeout=0)[0])
        progress: Progress = ray.get(coordinator.progress.remote(num_rounds, num_records, POLL_S))
        if progress.started and not started:
            on_start()
            started = True
        for record in progress.records:
            if log.isEnabledFor(record.levelno):
                log.handle(record)
        for row, means in progress.rounds:
            on_round(row, means)
        if progress.wave is not None:
            on_wave(progress.wave)
        num_rounds += len(progress.rounds)
        num_records += len(progress.records)
        if (ended or progress.over) and not progress.rounds and not progress.records:
            return


@contextmanager
def executor(setup: Setup, runtime: Runtime, kind: type[RayExecutor] = RayExecutor) -> Iterator[RayExecutor]:
    """Client actors for this process's own use, without a coordinator (benchmarks, tests)."""
    with session(runtime, setup):
        pool = kind(put_setup(setup), placed(runtime, setup))
        try:
            yield pool
        finally:
            pool.close()


@contextmanager
def session(runtime: Runtime, setup: Setup | None = None, resume: str | None = None) -> Iterator[None]:
    """Ray for a run: this process's own, the cluster that runtime.address or RAY_ADDRESS names, or a local one.

    A local one is configured for the states of `setup`, if given, and lets nobody else in: actors/access.py. A Ray that
    was started or joined here is shut down.
    `resume` is the command that goes on where Ray fails, if there is something to go on with.
    ClusterError if no cluster answers or Ray does not start, RayflError for a wrong address.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = runtime.cluster
    if address:
        _check_reachable(address)
    with access.joined(address) if address else access.private(), _without_ray_lines():
        try:
            if address:
                fork_server.end()
                _join(address)
            else:
                require_room_here(runtime)
                _start(runtime, setup is not None and heap.overflows(setup), resume)
            yield
        finally:
            supervisor.report(cluster=None, processes={})
            ray.shutdown()
            fork_server.end()


@contextmanager
def _without_ray_lines() -> Iterator[None]:
    """What Ray's processes publish, such as twenty lines of the log of a raylet that died, is logged for us alone.

    Ray prints it to stdout, also without `log_to_driver`.
    """
    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda data, ignore_prefix: log.debug(" ".join(data["lines"]))
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def opening(runtime: Runtime) -> str:
    """What `session` does first, in words."""
    if ray.is_initialized():
        return "starting client actors"
    found = runtime.cluster
    return f"joining the Ray cluster at {found}" if found else "starting Ray"


def address() -> str:
    """The address at which other processes join the Ray of this session."""
    return ray.get_runtime_context().gcs_address


def placed(runtime: Runtime, setup: Setup) -> Placement:
    """The client actors of a run in this session. RayflError if the cluster cannot hold them."""
    return place(runtime, nodes(), setup.most_actors, joined=runtime.cluster is not None)


def shared(runtime: Runtime, parallel: int, most_calls: int) -> Runtime:
    """The runtime of each of `parallel` runs at once in this session, of which each can use `most_calls` actors.
    RayflError if the cluster cannot hold them."""
    return share(runtime, nodes(), parallel, most_calls, joined=runtime.cluster is not None)


def _join(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray could not join the cluster at {address!r}: {error}; are the versions of Ray and Python equal?"
        ) from error
    supervisor.report(cluster=address)


def _check_reachable(address: str) -> None:
    """ClusterError if nothing listens at host:port, which Ray itself would try for minutes; "auto" is Ray's own."""
    if address.startswith("ray://"):
        raise RayflError(
            f"address={address!r} is a Ray client's, through which no coordinator can be placed; run on the cluster "
            "itself with: ray job submit --working-dir . -- python -m jobs.run FILE"
        )
    if address.startswith(("http://", "https://")):
        raise RayflError(
            f"address={address!r} is that of a dashboard, which takes jobs: run on the cluster itself with: ray job "
            f"submit --address {address} --working-dir . -- python -m jobs.run FILE; or unset RAY_ADDRESS"
        )
    host, colon, port = address.rpartition(":")
    if address == "auto":
        return
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not host.isascii() or not 0 < int(port) < 1 << 16:
        raise RayflError(f"address={address!r} is not allowed: give host:port of a Ray head, auto, or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); start one, or unset RAY_ADDRESS and "
            "runtime.address to run on this machine alone"
        ) from None


def _start(runtime: Runtime, crowded: bool, resume: str | None) -> None:
    """A Ray of our own; `crowded`: the coordinator's memory does not hold what Ray would keep there.

    ClusterError where it does not start at a second try either.
    """
    memory = runtime.object_store_memory_mb
    limits = {"max_direct_call_object_size": heap.LOW_LIMIT_BYTES} if crowded else {}
    try:
        _init(memory, limits)
    # Ray raises whatever comes, Exception itself among it.
    except Exception:  # noqa: BLE001
        ray.shutdown()
        try:
            _init(memory, limits)
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"Ray did not start, nor at a second try ({type(error).__name__}: {words}); nothing was begun or "
                "changed: look at memory, disk and rights of /dev/shm and Ray's folder (RAY_TMPDIR, or /tmp/ray), then "
                + (f"go on with: {resume}" if resume else "run it again")
            ) from error
    supervisor.report(processes=_own_processes())


def _own_processes() -> dict[str, int]:
    """The processes without which the Ray that this process started ends, by the names that Ray has for them."""
    node = worker._global_node
    assert node is not None
    return {name: node.all_processes[name][0].process.pid for name in ("gcs_server", "raylet")}


def _init(memory_mb: int | None, limits: Mapping[str, int]) -> None:
    with lean_node(fork_server.begin()):
        ray.init(
            address="local",
            _node_ip_address=access.LOOPBACK,
            include_dashboard=False,
            object_store_memory=None if memory_mb is None else memory_mb * 10**6,
            logging_level=logging.CRITICAL,
            log_to_driver=False,
            _system_config={
                # Ray frees once a second by default, and until then every round's models lie in fresh pages of the
                # store.
                "free_objects_period_milliseconds": 50,
                # Ray keeps a history of the last 100,000 calls for its dashboard, which is off: 3 to 4 kB each.
                "task_events_report_interval_ms": 0,
                # Ray would start workers now and let ray.init wait for all of them: for ever where one dies as it
                # starts.
                "prestart_worker_first_driver": False,
                # Ray takes a worker that died as it started for one that is slow, and waits. By default it waits 60 s,
                # and two such deaths are all of runtime.start_timeout_s.
                "worker_register_timeout_seconds": 30,
                **limits,
            },
        )


@contextmanager
def stoppable(on_stop: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Whether a first SIGINT or SIGTERM has come, which calls `on_stop`; the next one raises KeyboardInterrupt."""
    asked: list[bool] = []

    def stop() -> None:
        asked.append(True)
        on_stop()

    with interruptible(stop):
        yield lambda: bool(asked)


@contextmanager
def interruptible(stop: Callable[[], object]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop`, the next raises KeyboardInterrupt. Only the main thread can.

    Inside another such block both are asked to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    interrupt = Interrupt(stop, {number: signal.getsignal(number) for number in numbers})
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in interrupt.before.items():
            signal.signal(number, handler)


@dataclass
class Interrupt:
    """A handler of signals; `before` are those that it stands in for."""

    stop: Callable[[], object]
    # Any: a handler is a function, a number of its own, or None.
    before: Mapping[int, Any]
    asked: bool = False
    last: tuple[int, float] = (0, 0.0)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        (before, moment), self.last = self.last, (number, time.monotonic())
        if number == before and self.last[1] - moment < _TWICE_S:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.stop()
        outer = self.before[number]
        if isinstance(outer, Interrupt) and not outer.asked:
            outer(number, frame)
