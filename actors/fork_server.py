"""A process that loads once what workers need, torch above all, and forks the workers of a Ray of our own.

A worker that starts from nothing takes two seconds of a core to import, and memory of its own for it; a forked one is
there in milliseconds, and shares the memory. So is the one that replaces a worker which died.

Ray starts actors/forked_worker.py in place of its own worker, and that asks here. This process computes nothing and has
one thread, so that its forks are as good as new: what decides bits (`prepare_process`) is set before torch is loaded,
and what is read where a library is first used is read in the fork. Ray is loaded there, too, as it reads its settings
where it is loaded.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Beside this file lie modules of ours, which are none of Python's; the packages lie one floor up.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from actors.forked_worker import LENGTH_BYTES

WORKER = Path(__file__).with_name("forked_worker.py")
"""The program that Ray starts in place of its own worker."""

_LOADED = (
    "rayfl.rounds.worker",
    "rayfl.experiment.description",
    "rayfl.experiment.experiment",
    "rayfl.run_directory.play_run",
    "rayfl.determinism.platform",
    "rayfl.determinism.torch_flags",
    "rayfl.limits.gpu",
)
"""Modules that actors and coordinators load, torch with them."""

_USED_BY_RAY = (
    "colorama",
    "filelock",
    "google.protobuf.descriptor_pb2",
    "jsonschema",
    "msgpack",
    "packaging.version",
    "psutil",
    "requests",
    "yaml",
)
"""What Ray itself loads in every worker, as far as it is there."""

_PATIENCE_S = 5.0
"""For a request to come whole. Who has been stopped in the middle of it becomes a worker of Ray's own later."""

_OUT_OF_MEMORY_SCORE = "1000"
"""Ray lets the kernel, where memory runs out, end a worker before anything else."""


class ForkServer:
    """A fork server that is starting; `end` ends it, and so does the end of this process. Its workers live on.

    OSError where this machine cannot have one.
    """

    def __init__(self) -> None:
        # Nobody but the user gets into this folder, so nobody else reaches the socket.
        self.folder = tempfile.mkdtemp(prefix="rayfl-")
        self.socket = str(Path(self.folder, "socket"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with listener:
                listener.bind(self.socket)
                listener.listen(socket.SOMAXCONN)
                self.process = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno())],
                    # It ends when this pipe does.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def started() -> ForkServer | None:
    """A fork server; None where this machine cannot have one, so that Ray starts its own workers."""
    if sys.platform == "linux":
        with suppress(OSError):
            return ForkServer()
    return None


@contextmanager
def serving() -> Iterator[ForkServer | None]:
    """`started`, which ends with the block."""
    server = started()
    try:
        yield server
    finally:
        if server is not None:
            server.end()


_begun: ForkServer | None = None


def begin() -> ForkServer | None:
    """`started` for the Ray that this process will start, unless that has been done."""
    global _begun
    if _begun is None and (server := started()):
        _begun = server
        atexit.register(end)
    return _begun


def end() -> None:
    """End the fork server, if there is one."""
    global _begun
    if _begun is not None:
        server, _begun = _begun, None
        atexit.unregister(end)
        server.end()


def load() -> None:
    """Load what actors load, after what must come before torch, and without Ray."""
    from rayfl.determinism.process import prepare_process

    prepare_process()
    for name in _LOADED:
        import_module(name)
    for name in _USED_BY_RAY:
        with suppress(ImportError):
            import_module(name)
    assert "ray" not in sys.modules, "Ray reads its settings where it is loaded, so each fork loads its own"
    # The collector of a fork would write to the pages of all these objects, and so copy them.
    gc.collect()
    gc.freeze()


# Any: what JSON holds.
def serve(listener: socket.socket) -> tuple[Mapping[str, Any], list[int]]:
    """Fork for every request, until the process that has started this one ends. Returns, in each fork, its request and
    its streams."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE_S)
            streams: list[int] = []
            try:
                head, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
                with connection.makefile("rb") as reader:
                    request = json.loads(reader.read(int.from_bytes(head, "big")))
            except (OSError, ValueError):
                for stream in streams:
                    os.close(stream)
                continue
            fork = os.fork()
            # Ray ends a worker's group with the worker. Both see to it: whoever asked ends, and its group may, as soon
            # as this process has answered, and a fork must not begin its work before.
            with suppress(OSError):
                os.setpgid(fork, request["group"])
            if not fork:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return request, streams
            for stream in streams:
                os.close(stream)
            with suppress(OSError):
                connection.sendall(b"1")


# Any: what JSON holds.
def become(request: Mapping[str, Any], streams: list[int]) -> None:
    """Take on what the process had that asked: arguments, environment, folder, signals and streams."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = list(request["words"])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE)

    import numpy

    # Python's own is sown anew by the fork.
    numpy.random.seed()  # noqa: NPY002 (a method of somebody else may draw from it)


if __name__ == "__main__":
    # An interrupt at the terminal is the driver's, and the kernel is to keep no fork that has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    load()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        found = serve(listener)
    become(*found)
    runpy.run_path(sys.argv[0], run_name="__main__")
