"""Several runs of a sweep at once, each in a process of its own, so that one that dies does not harm the others.

Each process is the command `rayfl run --resume`, and a Ray job of its own on the sweep's Ray. `rayfl ls` shows the
rounds of the runs.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from signal import SIGINT
from typing import Literal

from actors.signals import stoppable
from jobs.console import Audience
from jobs.display import Overall
from jobs.failures import INTERRUPTED, LIMIT
from jobs.standard_output import say
from rayfl.experiment import toml
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.input_files import absolute
from rayfl.experiment.sweep import Combination

LOOK_S = 5.0
"""Seconds between looks at what the runs print."""

Status = Literal["finished", "skipped", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How the run of a combination ended; `error` is the sentence of a failed run."""

    combination: Combination
    directory: Path
    status: Status
    error: str = ""


@dataclass
class Processes:
    """Runs combinations in processes that join the Ray at `address` (None: without Ray).

    overwrite: replace earlier runs.
    """

    directory: Path
    address: str | None
    overwrite: bool
    overall: Overall
    audience: Audience
    stopping: bool = False
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, waiting: Sequence[Combination], parallel: int) -> list[Outcome]:
        """Run up to `parallel` at once. The first signal lets each run end its round, the second ends it at once."""
        outcomes = []
        with (
            tempfile.TemporaryDirectory() as files,
            ThreadPoolExecutor(parallel) as pool,
            stoppable(self.stop),
        ):
            futures = [pool.submit(self._one, one, Path(files) / str(n)) for n, one in enumerate(waiting)]
            try:
                for future in as_completed(futures):
                    if (outcome := future.result()) is not None:
                        outcomes.append(outcome)
                        self.overall.over(outcome.combination.title)
                        say(f"[{len(outcomes)}/{len(waiting)}] {outcome.combination.title}: {outcome.status}")
            except KeyboardInterrupt:
                self._each(subprocess.Popen.kill)
                raise
        return outcomes

    def stop(self) -> None:
        """Begin no further run, and ask the current ones to end."""
        self.overall.stopping()
        with self.lock:
            self.stopping = True
            self._each(lambda process: process.send_signal(SIGINT))

    def _each(self, act: Callable[[subprocess.Popen[bytes]], None]) -> None:
        for process in list(self.running.values()):
            act(process)

    def _one(self, one: Combination, files: Path) -> Outcome | None:
        """One run from start to end, with `files` as a folder for it; None if it was not begun."""
        directory = self.directory / one.directory
        files.mkdir()
        with (files / "log").open("wb") as log, (files / "lines").open("wb") as lines, self.lock:
            if self.stopping or self.audience.is_over(one.experiment.runtime.limit_s):
                return None
            # A session of its own, so that a terminal's Ctrl-C reaches it once, from `stop`.
            process = subprocess.Popen(
                self._command(one.experiment, directory, files / "experiment.toml"),
                stdout=lines,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
            self.running[one.directory] = process
        self.overall.begin(one.title)
        status, error = _end(_followed(process, one.title, files / "lines"), files / "log")
        del self.running[one.directory]
        # A signal ends a process that is still starting at once, with another exit code.
        return Outcome(one, directory, "stopped" if self.stopping and status == "failed" else status, error)

    def _command(self, experiment: Experiment, directory: Path, file: Path) -> list[str]:
        """The command that runs an experiment, which is written to `file`, or goes on with its unfinished run."""
        file.write_text(toml.dumps(absolute(experiment.as_dict())), encoding="utf-8")
        # The limit counts from the begin of the sweep.
        ends = self.audience.began + (experiment.runtime.limit_s or inf)
        left = [f"runtime.limit_s={max(1.0, ends - time.monotonic()):.0f}"] if ends < inf else []
        way = "--overwrite" if self.overwrite else "--resume"
        return [sys.executable, "-m", "rayfl", "run", str(file), "--output", str(directory), way, *left]

    def _environment(self) -> dict[str, str]:
        here = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        address = {"RAY_ADDRESS": self.address} if self.address else {}
        return {**os.environ, "PYTHONPATH": path} | address


def _followed(process: "subprocess.Popen[bytes]", title: str, lines: Path) -> int:
    """The exit code of a run's process, after its end. Before that, repeat what it prints about waiting for room."""
    said = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        waiting = [line for line in lines.read_text("utf-8", "replace").splitlines() if "waiting for " in line]
        for line in waiting[said:]:
            say(f"{title}: {line}")
        said = len(waiting)


def _end(code: int, log: Path) -> tuple[Status, str]:
    """Status and error of a process: the last sentence of rayfl in its log, or else the last line."""
    if code == 0:
        return "finished", ""
    if code in (INTERRUPTED, LIMIT):
        return "stopped", ""
    lines = [one for one in log.read_text(encoding="utf-8", errors="replace").splitlines() if one.strip()]
    sentences = [one.removeprefix("rayfl: ") for one in lines if one.startswith("rayfl: ")]
    return "failed", (sentences or lines or [f"its process ended with code {code}"])[-1]
