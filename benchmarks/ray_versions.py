"""The benchmark `ray_versions`: whether rayfl works with other versions of Ray.

Each version of Ray is installed into a virtual environment that also has all other packages of the running Python.
There rayfl plays the demo in one process, on Ray, on Ray without its private parts, and on Ray with an actor that is
killed; and a process tries to join a session without its token.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from actors.ray_internals import PARTS, PLAIN
from benchmarks.environments import LIMIT_S, ROOT, ROUNDS, Environment, Failed, cell, print_row
from benchmarks.figures import Column, Figures, Results
from rayfl.errors import RayflError

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


def bench_ray_versions(versions: Sequence[str], results: Results) -> int:
    """Try all versions, print a Markdown table, and write `results`. Return an exit code: 1 if a check failed."""
    results.require()
    if not versions:
        raise RayflError("name the versions of Ray to try, as 2.54.1 2.60.0")
    columns = ["ray", "private parts", "one process", "on Ray", f"{PLAIN}=1", "an actor killed", "without the token"]
    figures = Figures("versions", [Column(name) for name in columns])
    print_row(columns, heading=True)
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="ray") as folder:
            cells = [version, *Trial(Path(folder), version).checks()]
        figures.add(*cells)
        print_row(cells)
    results.write(figures, rounds=ROUNDS, python=sys.version.split()[0])
    return int(any("fails" in value for row in figures.rows for value in row.values()))


class Trial(Environment):
    """A version of Ray in a virtual environment in `folder`."""

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        others = [path for path in sys.path if path.endswith("-packages")]
        (site / "others.pth").write_text("\n".join([str(ROOT), *others]))
        install = ["pip", "install", "--quiet", "--no-deps", "--target", str(site), f"ray=={version}"]
        subprocess.run([sys.executable, "-m", *install], check=True)

    def checks(self) -> list[str]:
        """Run all checks; return the cells of the version's row."""
        checks: Sequence[Callable[[], str]] = (self.parts, self.inline, self.on_ray, self.plain, self.kill, self.token)
        return [cell(check) for check in checks]

    def parts(self) -> str:
        """Count the private parts that this Ray has."""
        return f"{self.output('-c', _PARTS).strip()} of {len(PARTS)}"

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
        if process.wait(LIMIT_S) or not killed:
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
            session.communicate(timeout=LIMIT_S)
        return "refused"


def _kill_actor(root: int) -> bool:
    """Kill the client actor below the process `root` that started last. Return False if there is none."""
    for process in sorted(psutil.Process(root).children(recursive=True), key=lambda child: child.pid, reverse=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            # Ray 2.55 gives a forked worker no name: its words are those of the fork server.
            forked = any("fork_server" in word for word in words) and words == psutil.Process(process.ppid()).cmdline()
            if forked or "".join(words).startswith("ray::ClientActor"):
                process.kill()
                return True
    return False
