"""Ctrl-C before the first round: one sentence, exit code 130, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs.failures import INTERRUPTED
from tests.refusals import check_sentence

ROOT = Path(__file__).resolve().parents[2]
WAITING = "import os, pathlib, time\npathlib.Path(os.environ['READY']).touch()\ntime.sleep(120)\n"
"""A module during whose import the program is interrupted."""
FILE = """
rounds = 1
data = "{data}"
partition = "iid"
clients = {{count = 2}}
model = "logistic"
method = "fedavg"
"""


def interrupted(folder: Path, ready: Callable[[psutil.Process], bool], *words: str) -> "subprocess.CompletedProcess":
    """`rayfl WORDS` in `folder`, to which a terminal's Ctrl-C comes as soon as `ready` is true of its process."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    around |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "READY": str(folder / "ready")}
    command = [sys.executable, "-m", "rayfl", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=around, start_new_session=True, **pipes) as process:
        deadline = time.monotonic() + 100
        while not ready(psutil.Process(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        # A terminal sends it to all processes of the command.
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def check(done: "subprocess.CompletedProcess[str]", folder: Path) -> None:
    assert done.returncode == INTERRUPTED, done.stderr
    check_sentence(done.stderr.removesuffix("\n"), ["interrupted", "run it again"])
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("module", ["click", "torch", "numpy"])
def test_while_modules_are_loaded(module: str, tmp_path: Path):
    (tmp_path / f"{module}.py").write_text(WAITING)
    (tmp_path / "file.toml").write_text(FILE.format(data="digits"))
    done = interrupted(tmp_path, lambda process: (tmp_path / "ready").exists(), "run", "file.toml", "--inline")
    check(done, tmp_path)


def test_a_library_that_makes_another_error_of_it_is_seen_through(tmp_path: Path):
    lines = WAITING.replace("time.sleep(120)", "try:\n    time.sleep(120)\nexcept BaseException as error:")
    (tmp_path / "numpy.py").write_text(f"{lines}    raise ImportError('initialization failed') from error\n")
    (tmp_path / "file.toml").write_text(FILE.format(data="digits"))
    done = interrupted(tmp_path, lambda process: (tmp_path / "ready").exists(), "run", "file.toml", "--inline")
    check(done, tmp_path)


def test_while_the_data_are_read(tmp_path: Path):
    lines = WAITING.replace("\n", "\n        ").rstrip()
    (tmp_path / "mine.py").write_text(
        f"from rayfl.data.datasets import Source\n\n\nclass Mine(Source):\n    def load(self):\n        {lines}\n"
    )
    (tmp_path / "file.toml").write_text(FILE.format(data="mine.py:Mine"))
    done = interrupted(tmp_path, lambda process: (tmp_path / "ready").exists(), "run", "file.toml")
    check(done, tmp_path)


@pytest.mark.ray
def test_while_ray_starts(tmp_path: Path):
    (tmp_path / "file.toml").write_text(FILE.format(data="digits"))
    seen: list[psutil.Process] = []

    def starting(process: psutil.Process) -> bool:
        seen[:] = process.children(recursive=True)
        return any(child.name().startswith(("gcs_server", "raylet")) for child in seen)

    check(interrupted(tmp_path, starting, "run", "file.toml"), tmp_path)
    assert psutil.wait_procs(seen, timeout=20)[1] == []
