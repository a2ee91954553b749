"""A fork server: a process that loads once the modules that workers need, torch above all, and forks the workers of a
Ray that rayfl starts.

A new process takes two seconds of a core to import these modules, and memory of its own for them. A fork starts in
milliseconds and shares that memory. The replacement of a worker that died is a fork, too.

Ray starts actors/forked_worker.py in place of its own worker, and that program asks this process for a fork. This
process computes nothing and has one thread, so a fork computes as a new process does: `prepare_process` is called
before torch is loaded, and the settings that a library reads at its first use are read in the fork. Each fork loads Ray
itself, because Ray reads its settings as it is loaded.
"""

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
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Modules in this file's folder must not hide Python's; the packages are in the folder above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from actors.folders import PrivateFolder
from actors.forked_worker import LENGTH_BYTES
from actors.ray_internals import is_plain

_LOADED = (
    "rayfl.rounds.worker",
    "rayfl.run_directory.description",
    "rayfl.experiment.experiment",
    "rayfl.run_directory.play_run",
    "rayfl.determinism.platform",
    "rayfl.determinism.torch_flags",
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
"""Modules that Ray loads in every worker; those that are not installed are left out."""

_PATIENCE_S = 5.0
"""Timeout for one request, in seconds. A program that sends too slowly becomes Ray's own worker instead."""

_OUT_OF_MEMORY_SCORE = "1000"
"""Ray's own score for workers: if memory runs out, the kernel ends a worker before any other process."""


class ForkServer:
    """The process of a fork server. It ends with `end`, or when this process ends; its workers live on.

    Raise OSError if this machine cannot have one.
    """

    def __init__(self) -> None:
        # Only the user may enter this folder, so nobody else reaches the socket.
        self.folder = PrivateFolder()
        self.socket = str(Path(self.folder.path, "socket"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with listener:
                listener.bind(self.socket)
                listener.listen(socket.SOMAXCONN)
                self.process = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno())],
                    # The server ends when this pipe is closed.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                )
        except BaseException:
            self.folder.remove()
            raise

    def end(self) -> None:
        """End the server."""
        with self.process:
            self.process.kill()
        self.folder.remove()


_begun: ForkServer | None = None


def begin() -> ForkServer | None:
    """Start the server for the Ray that this process will start, unless it has been started already.

    None if this machine cannot have one or the user wants none, so that Ray starts workers.
    """
    global _begun
    if _begun is None and not is_plain():
        with suppress(OSError):
            _begun = ForkServer()
    return _begun


def end() -> None:
    """End the fork server, if there is one."""
    global _begun
    if _begun is not None:
        _begun.end()
        _begun = None


def load() -> None:
    """Import the modules that actors need, but not Ray. `prepare_process` must run before torch is imported."""
    from rayfl.determinism.process import prepare_process

    prepare_process()
    # Arrow's allocator would start a thread, and a fork that meets it at work may wait for ever.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for name in _LOADED:
        import_module(name)
    for name in _USED_BY_RAY:
        with suppress(ImportError):
            import_module(name)
    assert "ray" not in sys.modules, "Ray reads its settings as it is loaded, so each fork loads its own"
    # The garbage collector of a fork would write to the pages of all these objects, and so copy them.
    gc.collect()
    gc.freeze()


# Any: what JSON holds.
def serve(listener: socket.socket) -> tuple[Mapping[str, Any], list[int]]:
    """Fork for every request, until the process that started this one ends.

    Returns in each fork, with the fork's request and streams.
    """
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
            # Ray ends a worker's process group with the worker, so the fork must be in it before it begins to work and
            # before this process answers: the program that asked then ends, and its group may end with it. Both
            # processes set the group, whichever comes first.
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
    """Take over from the process that asked: its arguments, environment, folder, signals and streams."""
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
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

    # Python seeds its own generator anew in a fork.
    numpy.random.seed()  # noqa: NPY002 (a third party's method may draw from it)


if __name__ == "__main__":
    # An interrupt at the terminal is for the driver, and the kernel must not keep forks that have ended as zombies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    load()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        request, streams = serve(listener)
    become(request, streams)
    runpy.run_path(sys.argv[0], run_name="__main__")
