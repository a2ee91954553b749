"""A virtual environment in which other versions of packages are tried, and the checks of rayfl that run there."""

import os
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.run_directory.record import read_run

ROOT = Path(__file__).parents[1]
ROUNDS = 60
LIMIT_S = 400
"""Seconds that one command may take."""


class Failed(Exception):
    """A check that failed; the text says why."""


class Environment:
    """A virtual environment in `folder`, where the demo can be played. with_pip: it has a pip of its own."""

    def __init__(self, folder: Path, with_pip: bool = False) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=with_pip)
        self.python = str(folder / "venv" / "bin" / "python")

    def inline(self) -> str:
        """Play without Ray."""
        self.play("inline", "--inline")
        return "yes"

    def on_ray(self) -> str:
        """Play on Ray."""
        self.play("ray")
        return self.compared("ray")

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
        code, text = self.result(words, variables)
        if code:
            raise Failed(" ".join(text.split())[-300:])
        return text

    def result(
        self,
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
        cwd: Path | None = None,
    ) -> tuple[int, str]:
        """Run a Python of this environment; return its exit code and its output."""
        process = self.start(*words, cwd=cwd, **(variables or {}))
        try:
            text, _ = process.communicate(timeout=limit_s)
        finally:
            process.kill()
        return process.returncode, text

    def start(self, *words: str, cwd: Path | None = None, **variables: str) -> "subprocess.Popen[str]":
        """Start a Python of this environment, by default in `folder`."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYFL_"))}
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            [self.python, *words], env=clean | variables, cwd=cwd or self.folder, text=True, **streams
        )


def bits(directory: Path) -> list[Any]:
    """Everything that a run recorded except real seconds, and its models' files."""
    run = read_run(directory)
    tables = [table.to_pylist() for table in (run.rounds, run.clients, run.metrics)]
    rows = [{key: value for key, value in row.items() if key != "wall_s"} for table in tables for row in table]
    return [*rows, *(path.read_bytes() for path in sorted((directory / "models").iterdir()))]


def cell(check: Callable[[], str]) -> str:
    """The result of a check, for a table."""
    try:
        return check()
    # If a check fails, the others still run.
    except Exception as error:  # noqa: BLE001
        return f"fails ({type(error).__name__}: {' '.join(str(error).split())[-200:]})".replace("|", "/")


def print_row(cells: Sequence[str], heading: bool = False) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |" + f"\n|{'---|' * len(cells)}" * heading, flush=True)
