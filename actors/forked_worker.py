"""The program that Ray starts as a worker where there is a fork server (actors/fork_server.py): it asks that for a
worker with its own arguments, environment and streams, and ends.

Where the server is gone it becomes the worker that Ray would have started. Nothing is imported but what Python brings:
this program is to be over within milliseconds.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec

SERVER = "RAYFL_FORK_SERVER"
"""The environment variable with the socket of the fork server."""

LENGTH_BYTES = 8
"""Of a request's length, which goes before it."""


def ask(server: str) -> bool:
    """Whether the server has made a worker in place of this process."""
    # Blocked signals stay blocked in Ray's workers: an interrupt at the terminal is the driver's.
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    request = {
        "words": [usual_worker(), *sys.argv[1:]],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        "blocked": blocked,
    }
    content = json.dumps(request).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server)
        socket.send_fds(connection, [len(content).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
        connection.sendall(content)
        # It answers once it has loaded what workers need, and has forked.
        return bool(connection.recv(1))
    return False


def usual_worker() -> str:
    """The program that Ray itself would start."""
    found = find_spec("ray")
    assert found is not None and found.origin is not None, "Ray has started this process"
    return os.path.join(os.path.dirname(found.origin), "_private", "workers", "default_worker.py")


if __name__ == "__main__" and not ask(os.environ.get(SERVER, "")):
    place = sys.orig_argv.index(sys.argv[0])
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:place], usual_worker(), *sys.argv[1:]])
