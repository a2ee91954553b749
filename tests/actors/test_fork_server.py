"""Workers that are forked, and the Ray that has them: their number, their place, and what comes where there is none."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from actors import fork_server, forked_worker, ray_internals
from actors.forked_worker import LENGTH_BYTES, SERVER, USUAL_WORKER

# What a process says of itself, as Ray's worker would run it; it waits for its stdin's end.
_SAYS = """
import json, os, sys, numpy, random, torch
here = {"words": sys.argv[1:], "mine": os.environ.get("MINE"), "folder": os.getcwd(), "group": os.getpgrp()}
here |= {"drawn": [numpy.random.rand(), random.random()], "parent": os.getppid(), "path": sys.path[0]}
here |= {"ray": "ray" in sys.modules, "instructions": torch.backends.cpu.get_cpu_capability()}
here |= {"score": open("/proc/self/oom_score_adj").read().strip()}
print(json.dumps(here), flush=True)
"""


@pytest.fixture
def server() -> Iterator[fork_server.ForkServer]:
    """A fork server of this test's own."""
    one = fork_server.ForkServer()
    yield one
    one.end()
    assert not Path(one.folder.path).exists()


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A program that says what it is, in place of Ray's own worker."""
    (tmp_path / "usual_worker.py").write_text(_SAYS)
    return tmp_path / "usual_worker.py"


# Any: what JSON holds.
def start(worker: Path, socket_path: str, *words: str, **environment: str) -> dict[str, Any]:
    """Start a worker as Ray does, and return what it says."""
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), USUAL_WORKER: str(worker)}
    done = subprocess.run(
        [sys.executable, forked_worker.__file__, *words],
        env={**around, **environment, SERVER: socket_path},
        cwd=worker.parent,
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        process_group=0,
    )
    return json.loads(done.stdout)


def test_a_forked_worker_is_what_ray_would_have_started(server: fork_server.ForkServer, worker: Path):
    given = {"MINE": "yes", "ATEN_CPU_CAPABILITY": "default"}
    found = start(worker, server.socket, "--words=a b", "--more", **given)
    usual = start(worker, "", "--words=a b", "--more", **given)
    for key in ("words", "mine", "folder", "path", "ray", "instructions"):
        assert found[key] == usual[key], key
    assert (found["words"], found["mine"], found["ray"]) == (["--words=a b", "--more"], "yes", False)
    # Libraries that read their settings where they are first used read those of the fork.
    assert found["instructions"] in ("DEFAULT", "NO AVX")
    assert found["parent"] == server.process.pid and found["score"] == "1000"
    assert len([*Path(f"/proc/{server.process.pid}/task").iterdir()]) == 1, "a fork beside threads may wait for ever"


def test_forks_draw_apart_and_are_each_in_the_group_that_ray_gave_it(server: fork_server.ForkServer, worker: Path):
    one, other = start(worker, server.socket), start(worker, server.socket)
    assert one["drawn"][0] != other["drawn"][0] and one["drawn"][1] != other["drawn"][1]
    assert len({one["group"], other["group"], os.getpgrp()}) == 3


def test_without_its_server_a_worker_is_rays_own(server: fork_server.ForkServer, worker: Path):
    server.process.kill()
    server.process.wait()
    found = start(worker, server.socket, "--words=a")
    assert found["words"] == ["--words=a"] and found["parent"] == os.getpid()


def test_who_asks_for_nothing_holds_nobody_up(
    server: fork_server.ForkServer, worker: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(server.socket)
        socket.send_fds(stopped, [(100).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
        assert start(worker, server.socket)["parent"] == server.process.pid
        assert stopped.recv(1) == b"", "a request that does not come whole is dropped"


def test_a_server_ends_with_the_process_that_began_it(tmp_path: Path):
    program = "import os\nfrom actors import fork_server\none = fork_server.ForkServer()\n"
    program += "print(one.process.pid, one.folder.path, flush=True)\n"
    done = subprocess.run([sys.executable, "-c", program + "os._exit(0)"], stdout=subprocess.PIPE, check=True)
    pid, folder = done.stdout.decode().split()
    ends = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "Z" or time.monotonic() < ends, "the fork server outlives its driver"
        if state == "Z":
            break
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_ports_are_free_in_a_row_and_others_for_whoever_asks_next(monkeypatch: pytest.MonkeyPatch):
    def asked() -> list[int]:
        """What a process is given that has asked for none yet."""
        monkeypatch.setattr(ray_internals, "_asked", count())
        return ray_internals.free_ports(4)

    first, second = asked(), ray_internals.free_ports(4)
    assert first == list(range(first[0], first[0] + 4)) and not set(first) & set(second)
    with socket.socket() as busy:
        busy.bind(("", first[random.randrange(4)]))
        assert asked() == second
    pid = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: pid + 1)
    assert not set(asked()) & set(first)


def test_no_port_is_chosen_where_the_kernel_may_give_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    low = tmp_path / "range"
    low.write_text("1024\t60999\n")
    monkeypatch.setattr(ray_internals, "_LOCAL_PORTS", low)
    assert ray_internals.free_ports(4) == []
    monkeypatch.setattr(ray_internals, "_LOCAL_PORTS", tmp_path / "nothing")
    assert ray_internals.free_ports(4) == []


_OWN_RAY = """
import os, ray
from pathlib import Path
from actors import fork_server, forked_worker, session
from rayfl.experiment.runtime import Runtime

@ray.remote(num_cpus=0)
def parent():
    return os.getppid()

with session.session(Runtime()):
    found = ray.get(parent.remote())
    server = fork_server._begun
    print(found == server.process.pid)
ended = Path(server.folder.path).exists(), server.process.poll() is None
print(*ended, fork_server._begun, forked_worker.SERVER in os.environ)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_of_our_own_forks_its_workers_and_leaves_nothing_behind():
    done = subprocess.run([sys.executable, "-c", _OWN_RAY], stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    assert done.stdout.splitlines() == ["True", "False False None False"]
