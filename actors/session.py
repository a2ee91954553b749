"""A Ray session: the local Ray that rayfl starts for its runs, or the cluster that it joins.

A Ray that rayfl starts listens on 127.0.0.1 and requires a random token. A cluster that rayfl joins keeps its rules.

The token is Ray's own token authentication: without it, Ray's servers and actors' processes refuse every call. Ray
reads its mode and token from the environment once a process, and Ray's processes inherit the environment. So a
session's token is in the environment of the session's processes, which only their user can read, and nowhere else.

No signature here has a type of Ray, so that jobs need not import Ray.
"""

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import ray

from actors import fork_server, ray_internals, supervision
from actors.errors import ClusterError
from actors.folders import BASE, PrivateFolder
from actors.placement import require_room_here
from rayfl.errors import RayflError, log
from rayfl.experiment.runtime import Runtime

LOOPBACK = "127.0.0.1"
"""The address of a node that no other machine can reach."""

_ANSWER_S = 5.0
"""Seconds in which a cluster's head must accept a connection, and say whether it requires a token."""


@contextmanager
def session(runtime: Runtime, resume: str | None = None) -> Iterator[None]:
    """Context manager: Ray for a run.

    It is the Ray that this process already uses, the cluster that runtime.address or RAY_ADDRESS names, or a new local
    Ray. A local Ray lets nobody else in. A Ray that was started or joined here is shut down
    at the end. `resume` is the command that continues the run, if there is a run to continue. Raise ClusterError if no
    cluster answers or Ray does not start, RayflError for a wrong address, or if this machine cannot hold the actors.
    """
    if ray.is_initialized():
        yield
        return
    supervision.tell_parent(processes={})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = runtime.cluster
    ray_here = started(runtime.object_store_memory_mb, resume) if cluster is None else joined(cluster)
    if cluster is None:
        require_room_here(runtime)
    with ray_internals.published_lines_logged(), ray_here:
        supervision.tell_parent(cluster=cluster, processes={} if cluster else ray_internals.own_processes())
        try:
            yield
        finally:
            supervision.tell_parent(cluster=None, processes={})


def opening(runtime: Runtime) -> str:
    """What `session` does first, in words for the user."""
    if ray.is_initialized():
        return "starting client actors"
    return f"joining the Ray cluster at {runtime.cluster}" if runtime.cluster else "starting Ray"


def address() -> str:
    """The address at which other processes join the Ray of this session."""
    return ray.get_runtime_context().gcs_address


@contextmanager
def private() -> Iterator[None]:
    """Context manager: a Ray that is started in the block requires a new random token and may listen on 127.0.0.1.

    This process and the processes that it starts in the block have the token. End the Ray in the block, too. The
    environment variables about tokens, which are for clusters, are restored after the block. Raise ClusterError if this
    process has loaded a Ray that cannot require a token.
    """
    without = {"RAY_AUTH_TOKEN_PATH": None, "RAY_ENABLE_K8S_TOKEN_AUTH": None}
    token = ray_internals.new_token()
    with _variables(token | without if token else {}), ray_internals.loopback():
        yield


@contextmanager
def started(object_store_memory_mb: int | None, resume: str | None) -> Iterator[None]:
    """Context manager: a local Ray with a store of `object_store_memory_mb`, which ends with the block.

    `resume`: the command that continues the run. Raise ClusterError if Ray does not start at a second try either.
    """
    with private(), ExitStack() as ending:
        ending.callback(fork_server.end)
        ending.callback(_start(object_store_memory_mb, resume).remove)
        ending.callback(ray_internals.shut_down)
        yield


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Context manager: join the cluster at `address` (host:port or auto), and leave it after the block.

    This process shows a token if it has one, in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names or in
    ~/.ray/auth_token; a cluster that requires none does not look at it, and a warning is logged. Raise RayflError for a
    wrong address; ClusterError if no cluster answers, or if it refuses this process.
    """
    _require_reachable(address)
    fork_server.end()
    if address != "auto" and _needs_no_token(address):
        log.warning(
            f"the cluster at {address} has no token authentication: whoever reaches its ports runs code there as its "
            "user; start it with RAY_AUTH_MODE=token"
        )
    mode = os.environ.get("RAY_AUTH_MODE", "token" if ray_internals.has_token() else None)
    with _variables({"RAY_AUTH_MODE": mode}), ray_internals.loopback():
        try:
            _join(address)
            yield
        finally:
            ray.shutdown()


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
            f"to run on that cluster itself: ray job submit {dashboard}--working-dir . -- python -m rayfl run FILE"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); start one, or unset RAY_ADDRESS and "
            "runtime.address to run on this machine alone"
        ) from None


def _join(address: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray could not join the cluster at {address!r}: {error}; are the versions of Ray and Python equal, and is "
            "the cluster's token, if it asks for one, in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names or "
            "in ~/.ray/auth_token, and RAY_AUTH_MODE unset?"
        ) from error


def _needs_no_token(address: str) -> bool:
    """Whether the head of the cluster at `address` answers a call that has no token."""
    import grpc

    # Closed at once: a process with an open channel must not fork, as ray.init does.
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ray_internals.GET_CLUSTER_ID)(b"", timeout=_ANSWER_S)
        except grpc.RpcError:
            return False
    return True


@contextmanager
def _variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager: set environment variables (None: unset) in the block, and restore the earlier ones after it."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_internals.read_token_again()


def _start(object_store_memory_mb: int | None, resume: str | None) -> PrivateFolder:
    """Start Ray, at the second try if the first one fails; return the folder that holds Ray's folders."""
    try:
        return _init(object_store_memory_mb)
    # Ray raises anything, Exception itself too.
    except Exception:  # noqa: BLE001
        try:
            return _init(object_store_memory_mb)
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"Ray did not start, nor at a second try ({type(error).__name__}: {words}); no run was started or "
                "changed: look at memory, disk and rights of /dev/shm and of the folder for Ray's files "
                f"({BASE}, or TMPDIR), or set {ray_internals.PLAIN}=1 if this version of Ray is new, then "
                + (f"go on with: {resume}" if resume else "run it again")
            ) from error


def _init(object_store_memory_mb: int | None) -> PrivateFolder:
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
    )
    server = fork_server.begin()
    folder = PrivateFolder()
    try:
        # The public way to say where Ray makes its folders.
        with (
            _variables({BASE: folder.path}),
            warnings.catch_warnings(action="ignore", category=FutureWarning),
            ray_internals.lean_nodes(server and server.socket),
        ):
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=object_store_memory_mb and object_store_memory_mb * 10**6,
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                **settings,
            )
    except BaseException:
        ray_internals.shut_down()
        folder.remove()
        raise
    return folder
