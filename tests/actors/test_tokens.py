"""Nobody else gets into a Ray that rayfl starts, and rayfl says how it gets into another one."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray

from actors import ray_internals, session
from actors.errors import ClusterError
from actors.session import LOOPBACK
from tests.actors.toys import logged
from tests.refusals import check_sentence, refused

pytestmark = pytest.mark.ray

STRANGER = """
import logging, sys
import ray
from ray._private import ray_constants

# What rayfl does, too: Ray would knock at another address of this machine, where nothing listens.
ray_constants.ENABLE_RAY_CLUSTER = False
try:
    ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
    ray.get(ray.remote(lambda path: open(path, "w").close()).remote(sys.argv[2]), timeout=20)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("ran")
"""

CALLS = (
    "CoreWorkerService/PushTask",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Push",
    "ActorInfoGcsService/RegisterActor",
    "ReporterService/GetTraceback",
)
"""A call to each kind of server that a session has: it runs something, or writes or reads what others own."""


SERVERS = {"gcs_server", "raylet", "ray::DashboardA", "ray::RuntimeEnv"}
"""Of a session, beside its workers; the names of Linux have 15 letters."""


@pytest.fixture
def processes(cluster: None) -> list[psutil.Process]:
    """The processes of this session, a worker that has run something among them, and all servers listening."""
    assert ray.get(ray.remote(lambda: 1).remote()) == 1
    here, deadline = psutil.Process(), time.monotonic() + 240
    # On a busy machine agents load for a long time.
    while not {name[:15] for name, _, _ in listening(here.children(recursive=True))} >= SERVERS:
        assert time.monotonic() < deadline, "the session's servers do not listen"
        time.sleep(0.2)
    return [here, *here.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> Iterator[tuple[str, str, int]]:
    """Name, address and port of every socket on which processes listen for IP or receive it."""
    for process in processes:
        try:
            for socket in process.net_connections("inet"):
                if socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    yield process.name(), socket.laddr.ip, socket.laddr.port
        except psutil.NoSuchProcess:
            continue


def test_a_session_listens_on_loopback_alone(processes: list[psutil.Process]) -> None:
    found = list(listening(processes))
    assert [one for one in found if one[1].removeprefix("::ffff:") != LOOPBACK] == []
    assert {name[:15] for name, _, _ in found} >= SERVERS
    # This process is the driver.
    assert processes[0].name() in {name for name, _, _ in found}
    assert len(found) >= 7


def test_a_stranger_runs_nothing(cluster: None, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    clean["RAY_NUM_REDIS_GET_RETRIES"] = "2"
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    tries = [{"RAY_AUTH_MODE": "disabled"}, wrong, {**wrong, "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGER, address, tmp_path / str(number)],
            env=clean | each,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number, each in enumerate(tries)
    ]
    ends = [process.communicate(timeout=120)[0] for process in started]
    assert all(end.startswith(("ConnectionError", "RuntimeError")) for end in ends[:2]), ends
    # With the token it works, so nothing but the token kept the others out.
    assert ends[2] == "ran\n" and [path.name for path in tmp_path.iterdir()] == ["2"]


def test_no_server_of_a_session_takes_a_call_without_the_token(processes: list[psutil.Process]) -> None:
    answers = {call: set() for call in CALLS}
    for name, _, port in listening(processes):
        for call in CALLS:
            with (
                grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel,
                pytest.raises(grpc.RpcError) as raised,
            ):
                channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=5)
            answers[call].add(raised.value.code())
        if name.startswith("ray::RuntimeEnv"):
            # It installs packages, over HTTP.
            request = urllib.request.Request(f"http://{LOOPBACK}:{port}/get_or_create_runtime_env", b"")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=5)
    # Of the others, one does not know the call, and one speaks HTTP.
    known = {code for codes in answers.values() for code in codes} - {grpc.StatusCode.UNIMPLEMENTED}
    assert known == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
    assert all(grpc.StatusCode.UNAUTHENTICATED in codes for codes in answers.values()), answers


def test_a_cluster_is_joined_with_the_token_that_this_process_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[str | None] = []

    def init(**settings: Any) -> None:
        modes.append(os.environ.get("RAY_AUTH_MODE"))
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for variables in ({}, {"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_TOKEN": "0" * 64, "RAY_AUTH_MODE": "disabled"}):
        tokens = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None, "RAY_AUTH_MODE": None}
        with (
            session._variables(tokens | variables),
            refused(names=["auto", "Failed to connect", "RAY_AUTH_TOKEN", "~/.ray/auth_token"], error=ClusterError),
            session.joined("auto"),
        ):
            pass
    assert modes == [None, "token", "disabled"]


def test_a_tip_of_rays_is_not_shown(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    # As `ray.init` of some versions does.
    monkeypatch.setattr(ray, "init", lambda **settings: warnings.warn("Tip: In future ...", FutureWarning, 1))
    session._join("head:1")
    assert recwarn.list == []


def test_a_cluster_without_tokens_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    # As a head without token authentication answers: with the cluster's ID, of which nothing is read.
    service, call = ray_internals.GET_CLUSTER_ID.strip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {call: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
    server.start()
    monkeypatch.setattr(ray, "init", lambda **settings: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    try:
        with session.joined(address):
            pass
    finally:
        server.stop(None).wait()
    (sentence,) = logged(caplog)
    check_sentence(sentence, [address, "token", "RAY_AUTH_MODE=token"])
