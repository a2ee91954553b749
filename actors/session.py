"""A Ray session: the local Ray that rayfl starts for its runs, or the cluster that it joins.

No signature here has one of Ray's types, so that jobs need not know Ray.
"""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from actors import access, fork_server, heap, parent_process, ray_internals
from actors.errors import ClusterError
from actors.placement import Placement, nodes, place, require_room_here, share
from actors.ray_executor import RayExecutor
from actors.setups import put_setup
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Runtime
from rayfl.rounds.setup import Setup

_REACH_S = 5.0
"""Seconds in which a cluster's head must accept a connection."""


@contextmanager
def executor(setup: Setup, runtime: Runtime, kind: type[RayExecutor] = RayExecutor) -> Iterator[RayExecutor]:
    """Context manager: client actors that this process uses without a coordinator (benchmarks, tests)."""
    with session(runtime, setup):
        pool = kind(put_setup(setup), placement(runtime, setup))
        try:
            yield pool
        finally:
            pool.close()


@contextmanager
def session(runtime: Runtime, setup: Setup | None = None, resume: str | None = None) -> Iterator[None]:
    """Context manager: Ray for a run.

    It is the Ray that this process already uses, the cluster that runtime.address or RAY_ADDRESS names, or a new local
    Ray. A local Ray is configured for the client states of `setup`, if given, and lets nobody else in
    (actors/access.py). A Ray that was started or joined here is shut down at the end. `resume` is the command that
    continues the run, if there is a run to continue. Raise ClusterError if no cluster answers or Ray does not start,
    RayflError for a wrong address, or if this machine cannot hold the actors.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = runtime.cluster
    if cluster:
        _require_reachable(cluster)
        fork_server.end()
    else:
        require_room_here(runtime)
    with access.joined(cluster) if cluster else access.private(), ray_internals.published_lines_logged():
        try:
            if cluster:
                _join(cluster)
            else:
                _start(runtime, setup is not None and heap.overflows(setup), resume)
            parent_process.report(cluster=cluster, processes={} if cluster else ray_internals.own_processes())
            yield
        finally:
            parent_process.report(cluster=None, processes={})
            ray.shutdown()
            fork_server.end()


def opening(runtime: Runtime) -> str:
    """Say what `session` does first."""
    if ray.is_initialized():
        return "starting client actors"
    return f"joining the Ray cluster at {runtime.cluster}" if runtime.cluster else "starting Ray"


def address() -> str:
    """The address at which other processes join the Ray of this session."""
    return ray.get_runtime_context().gcs_address


def placement(runtime: Runtime, setup: Setup) -> Placement:
    """Decide where a run's client actors go in this session. Raise RayflError if the cluster cannot hold them."""
    return place(runtime, nodes(), setup.most_actors, joined=runtime.cluster is not None)


def shared(runtime: Runtime, parallel: int, most_calls: int) -> Runtime:
    """Return the runtime settings for each of `parallel` concurrent runs. One run can use at most `most_calls` actors.

    Raise RayflError if the cluster cannot hold them.
    """
    return share(runtime, nodes(), parallel, most_calls, joined=runtime.cluster is not None)


def _join(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray could not join the cluster at {address!r}: {error}; are the versions of Ray and Python equal?"
        ) from error


def _require_reachable(address: str) -> None:
    """Raise ClusterError if nothing listens at host:port, which Ray would try for minutes. "auto" is left to Ray."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    allowed = host and "//" not in host and host.isascii() and re.fullmatch("[0-9]{1,5}", port)
    if not allowed or not 0 < int(port) < 1 << 16:
        dashboard = f"--address {address} " if address.startswith("http") else ""
        raise RayflError(
            f"address={address!r} is not allowed: give host:port of a Ray head, auto or local, or unset RAY_ADDRESS; "
            f"to run on that cluster itself: ray job submit {dashboard}--working-dir . -- python -m jobs.run FILE"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); start one, or unset RAY_ADDRESS and "
            "runtime.address to run on this machine alone"
        ) from None


def _start(runtime: Runtime, crowded: bool, resume: str | None) -> None:
    """Start a local Ray; `crowded`: the coordinator's memory cannot hold the small states that Ray would keep there.

    Raise ClusterError if it does not start at a second try either.
    """
    try:
        _init(runtime.object_store_memory_mb, crowded)
    # Ray raises anything, Exception itself too.
    except Exception:  # noqa: BLE001
        ray.shutdown()
        try:
            _init(runtime.object_store_memory_mb, crowded)
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"Ray did not start, nor at a second try ({type(error).__name__}: {words}); nothing was begun or "
                "changed: look at memory, disk and rights of /dev/shm and Ray's folder (RAY_TMPDIR, or /tmp/ray), or "
                f"set {ray_internals.PLAIN}=1 if this version of Ray is new, then "
                + (f"go on with: {resume}" if resume else "run it again")
            ) from error


def _init(memory_mb: int | None, crowded: bool) -> None:
    limits = {"max_direct_call_object_size": heap.LOW_LIMIT_BYTES} if crowded else {}
    settings = ray_internals.system_config(
        # By default Ray frees objects once a second, and until then every round's models fill new pages of the store.
        free_objects_period_milliseconds=50,
        # Ray keeps a history of the last 100,000 calls, 3 to 4 kB each, for its dashboard, which is off.
        task_events_report_interval_ms=0,
        # Otherwise Ray starts workers now, and ray.init waits for all of them: for ever if one dies as it starts.
        prestart_worker_first_driver=False,
        # Ray takes a worker that died as it started for a slow one and waits for it: 60 s by default, and two such
        # deaths take all of runtime.start_timeout_s.
        worker_register_timeout_seconds=30,
        **limits,
    )
    server = fork_server.begin()
    with ray_internals.lean_nodes(server and server.socket):
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=None if memory_mb is None else memory_mb * 10**6,
            logging_level=logging.CRITICAL,
            log_to_driver=False,
            **settings,
        )
