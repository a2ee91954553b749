"""A real S3-compatible server on this machine: moto's, in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True)
class Server:
    """A server that listens at a port of this machine."""

    port: int

    def url(self, folder: str) -> str:
        """The URL of a folder, as bucket/experiments."""
        return f"s3://{folder}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", name)

    def forbid_writing(self, bucket: str) -> None:
        """Refuse all writing to a bucket, by its policy."""
        rule = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
        self._ask("PUT", f"{bucket}?policy", {"Version": "2012-10-17", "Statement": [rule]})

    def allow_writing(self, bucket: str) -> None:
        self._ask("DELETE", f"{bucket}?policy")

    def forget_everything(self) -> None:
        """Remove all buckets."""
        self._ask("POST", "moto-api/reset")

    def _ask(self, method: str, path: str, body: object = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30):
            pass


class Passage:
    """A port through which a server is reached, until `silent` is set: then it takes connections and never answers."""

    def __init__(self, server: Server) -> None:
        self.silent = threading.Event()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.reached = Server(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server.port))
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.silent.is_set():
                    target.sendall(data)
            target.close()


@contextmanager
def serving(**environment: str) -> Iterator[Server]:
    """A server with these variables of moto's; a test that needs one is skipped where moto is not installed."""
    pytest.importorskip("moto", reason="moto, of the extra test, is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    ) as process:
        try:
            _wait(port, process)
            yield Server(port)
        finally:
            process.kill()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"moto's server has ended with code {process.returncode}")
