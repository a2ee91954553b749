"""The program that Ray starts as a worker if there is a fork server (actors/fork_server.py): it asks the server for a
worker with its own arguments, environment and streams, and ends.

If the server is gone, this program becomes the worker that Ray would have started. It imports only the standard
library, so that it ends within milliseconds.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

SERVER = "RAYFL_FORK_SERVER"
"""The environment variable with the socket of the fork server."""

USUAL_WORKER = "RAYFL_USUAL_WORKER"
"""The environment variable with the path of the program that Ray itself would start."""

LENGTH_BYTES = 8
"""The bytes that hold a request's length, before the request."""


def ask(server: str) -> bool:
    """Whether the server has made a worker in place of this process."""
    request = {
        "words": [os.environ[USUAL_WORKER], *sys.argv[1:]],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        # Blocked signals stay blocked in Ray's workers: an interrupt at the terminal is for the driver.
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    content = json.dumps(request).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server)
        socket.send_fds(connection, [len(content).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
        connection.sendall(content)
        # The server answers when it has loaded what workers need, and has forked.
        return bool(connection.recv(1))
    return False


if __name__ == "__main__" and not ask(os.environ.get(SERVER, "")):
    position = sys.orig_argv.index(sys.argv[0])
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:position], os.environ[USUAL_WORKER], *sys.argv[1:]])
