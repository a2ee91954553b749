"""Several runs of a sweep at once, each in a process of its own, so that one that dies does not harm the others.

Each process is the command `rayfl run --resume`, and a Ray job of its own on the sweep's Ray. `rayfl ls` shows the
rounds of the runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from rayfl.experiment.input_files import absolute
from rayfl.experiment.sweep import Combination

Status = Literal["finished", "skipped", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How the run of a combination ended; `error` is the sentence of a failed run."""

    combination: Combination
    directory: Path
    status: Status
    error: str = ""


def run_at_once(
    waiting: Sequence[Combination],
    parallel: int,
    directory: Path,
    overwrite: bool,
    address: str | None,
    overall: Overall,
    audience: Audience,
) -> list[Outcome]:
    """Run up to `parallel` combinations at once, in processes that join the Ray at `address` (None: without Ray).

    The first signal lets each run end its round, and no further one begins; the second ends all at once.
    """
    running: list[subprocess.Popen[str]] = []

    def stop() -> None:
        overall.stopping()
        for process in running:
            process.send_signal(SIGINT)

    def attempt(one: Combination) -> Outcome | None:
        """One run from start to end; None if it was not begun."""
        if stopping() or audience.is_over(one.experiment.runtime.limit_s):
            return None
        with tempfile.TemporaryDirectory() as folder:
            # The limit counts from the start of the sweep.
            left_s = audience.began + (one.experiment.runtime.limit_s or inf) - time.monotonic()
            command = _command(one, directory, Path(folder, "experiment.toml"), overwrite, left_s)
            process = _begun(command, address)
            running.append(process)
            # The signal may have come meanwhile.
            if stopping():
                process.send_signal(SIGINT)
            status, error = _end(process, one.title)
        # A signal ends a process that is still starting at once, with another exit code.
        status = "stopped" if stopping() and status == "failed" else status
        overall.over()
        say(f"{one.title}: {status}")
        return Outcome(one, directory / one.directory, status, error)

    with ThreadPoolExecutor(parallel) as pool, stoppable(stop) as stopping:
        try:
            return [outcome for outcome in pool.map(attempt, waiting) if outcome is not None]
        except KeyboardInterrupt:
            for process in running:
                process.kill()
            raise


def _command(one: Combination, directory: Path, file: Path, overwrite: bool, left_s: float) -> list[str]:
    """The command that runs an experiment, which is written to `file`, or continues its unfinished run."""
    file.write_text(toml.dumps(absolute(one.experiment.as_dict())), encoding="utf-8")
    limit = [f"runtime.limit_s={max(1.0, left_s):.0f}"] if left_s < inf else []
    way = "--overwrite" if overwrite else "--resume"
    return [sys.executable, "-m", "rayfl", "run", str(file), "--output", str(directory / one.directory), way, *limit]


def _begun(command: Sequence[str], address: str | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **({"RAY_ADDRESS": address} if address else {})},
        # A session of its own, so that a terminal's Ctrl-C reaches it once, from `stop`.
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )


def _end(process: subprocess.Popen[str], title: str) -> tuple[Status, str]:
    """Wait for the end of a process, printing for what it waits. Status, and rayfl's last sentence or the last line."""
    words = ""
    with process:
        for line in process.stdout or ():
            if "waiting for " in line:
                say(f"{title}: {line.rstrip()}")
            if line.startswith("rayfl: ") or not words.startswith("rayfl: "):
                words = line.strip() or words
    code = process.returncode
    if code in (0, INTERRUPTED, LIMIT):
        return "stopped" if code else "finished", ""
    return "failed", words.removeprefix("rayfl: ") or f"its process ended with code {code}"
