"""The benchmark `ray_versions`: whether rayfl works with other versions of Ray.

Each version of Ray is installed into a virtual environment that also has all other packages of the running Python.
There rayfl plays the demo in one process, on Ray, on Ray without its private parts, and on Ray with an actor that is
killed; and a process tries to join a session without its token.
"""

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from actors.ray_internals import PARTS, PLAIN
from benchmarks.figures import Column, Figures, Results
from rayfl.errors import RayflError
from rayfl.run_directory.record import read_run

ROOT = Path(__file__).parents[1]
ROUNDS = 60
_LIMIT_S = 400
"""Seconds that one command may take."""

_PARTS = "from actors import ray_internals as r; print(sum(r.find(part) is not None for part in r.PARTS))"
_SESSION = """
import os, sys
from actors import session
from rayfl.experiment.runtime import Runtime
with session.session(Runtime()):
    print("session", session.address(), os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""
_JOINER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(lambda: "joined").remote(), timeout=100))
"""


class Failed(Exception):
    """A check that failed; the text says why."""


def bench_ray_versions(versions: Sequence[str], results: Results) -> int:
    """Try all versions, print a Markdown table, and write `results`. Return an exit code: 1 if a check failed."""
    results.require()
    if not versions:
        raise RayflError("name the versions of Ray to try, as 2.54.1 2.60.0")
    columns = ["ray", "private parts", "one process", "on Ray", f"{PLAIN}=1", "an actor killed", "without the token"]
    figures = Figures("versions", [Column(name) for name in columns])
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="ray") as folder:
            found = [version, *Trial(Path(folder), version).checks()]
        figures.add(*found)
        print(f"| {' | '.join(found)} |", flush=True)
    results.write(figures, rounds=ROUNDS, python=sys.version.split()[0])
    return int(any("fails" in cell for row in figures.rows for cell in row.values()))


class Trial:
    """A version of Ray in a virtual environment in `folder`."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        venv.create(folder / "venv")
        self.python = str(folder / "venv" / "bin" / "python")
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        others = [path for path in sys.path if path.endswith("-packages")]
        (site / "others.pth").write_text("\n".join([str(ROOT), *others]))
        install = ["pip", "install", "--quiet", "--no-deps", "--target", str(site), f"ray=={version}"]
        subprocess.run([sys.executable, "-m", *install], check=True)

    def checks(self) -> list[str]:
        """Run all checks; return the cells of the version's row."""
        checks: Sequence[Callable[[], str]] = (self.parts, self.inline, self.on_ray, self.plain, self.kill, self.token)
        return [_cell(check) for check in checks]

    def parts(self) -> str:
        """Count the private parts that this Ray has."""
        return f"{self.output('-c', _PARTS).strip()} of {len(PARTS)}"

    def inline(self) -> str:
        """Play without Ray."""
        self.play("inline", "--inline")
        return "yes"

    def on_ray(self) -> str:
        """Play on Ray."""
        self.play("ray")
        return self.compared("ray")

    def plain(self) -> str:
        """Play on Ray without its private parts."""
        self.play("plain", **{PLAIN: "1"})
        return self.compared("plain")

    def kill(self) -> str:
        """Play on Ray, and kill an actor with SIGKILL when the first round is over."""
        process = self.start(*self.words("killed"))
        assert process.stdout is not None
        lines, killed = [], False
        for line in process.stdout:
            lines.append(line)
            if not killed and f"/{ROUNDS} rounds" in line:
                killed = _kill_actor(process.pid)
        if process.wait(_LIMIT_S) or not killed:
            raise Failed("".join(lines)[-300:])
        return self.compared("killed")

    def token(self) -> str:
        """Let a process join the session with its token, and another one without."""
        session = self.start("-c", _SESSION)
        assert session.stdin is not None and session.stdout is not None
        try:
            # Ray may print lines of its own before.
            address, token = next(line.split()[1:] for line in session.stdout if line.startswith("session "))
            # Ray would replace the address 127.0.0.1, and give up after a few tries.
            around = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
            owner = self.output("-c", _JOINER, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, **around)
            if not owner.endswith("joined\n"):
                raise Failed(f"with its token nobody joins either: {owner}")
            with suppress(Failed, subprocess.TimeoutExpired):
                self.output("-c", _JOINER, address, RAY_AUTH_MODE="disabled", **around)
                raise AssertionError("a process without the token has joined")
        finally:
            session.communicate(timeout=_LIMIT_S)
        return "refused"

    def words(self, name: str, *more: str) -> list[str]:
        """The arguments of a run of the demo into the directory `name`."""
        settings = [f"rounds={ROUNDS}", "runtime.actors=2", "output.report=false"]
        return ["-m", "jobs.cli", "run", "demo", *settings, "--output", str(self.folder / name), *more]

    def play(self, name: str, *more: str, **variables: str) -> None:
        """Run the demo into the directory `name`."""
        self.output(*self.words(name, *more), **variables)

    def compared(self, name: str) -> str:
        """Compare a run with the run in one process. Raise Failed if a bit differs."""
        if bits(self.folder / name) != bits(self.folder / "inline"):
            raise Failed("other bits than in one process")
        return "same bits"

    def output(self, *words: str, **variables: str) -> str:
        """Run a Python of this environment and return its output. Raise Failed if it fails."""
        process = self.start(*words, **variables)
        try:
            text, _ = process.communicate(timeout=_LIMIT_S)
        finally:
            process.kill()
        if process.returncode:
            raise Failed(" ".join(text.split())[-300:])
        return text

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a Python of this environment."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYFL_"))}
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([self.python, *words], env=clean | variables, cwd=self.folder, text=True, **streams)


def bits(directory: Path) -> list[Any]:
    """Everything that a run recorded except real seconds, and its models' files."""
    run = read_run(directory)
    tables = [table.to_pylist() for table in (run.rounds, run.clients, run.metrics)]
    rows = [{key: value for key, value in row.items() if key != "wall_s"} for table in tables for row in table]
    return [*rows, *(path.read_bytes() for path in sorted((directory / "models").iterdir()))]


def _cell(check: Callable[[], str]) -> str:
    """The result of a check, for a table."""
    try:
        return check()
    # If a check fails, the others still run.
    except Exception as error:  # noqa: BLE001
        return f"fails ({type(error).__name__}: {' '.join(str(error).split())[-200:]})".replace("|", "/")


def _kill_actor(root: int) -> bool:
    """Kill the client actor below the process `root` that started last. Return False if there is none."""
    for process in sorted(psutil.Process(root).children(recursive=True), key=lambda one: one.pid, reverse=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            # Ray 2.55 gives a forked worker no name: its words are those of the fork server.
            forked = any("fork_server" in word for word in words) and words == psutil.Process(process.ppid()).cmdline()
            if forked or "".join(words).startswith("ray::ClientActor"):
                process.kill()
                return True
    return False
