"""Another process that plays experiments: `python -m benchmarks.fuzz_elsewhere`, which the benchmark `fuzz` starts.

Sets of words have another order there, because Python draws their hashes anew in each process, and memory lies
elsewhere. It reads a line of JSON for each experiment, its tables and its directory, and answers each with a line: an
error in words, or "".
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fuzz_experiments import Tables
from benchmarks.fuzz_plays import Play, Played, play

HASHES = "11"
"""Of words, in the other process."""


class Elsewhere:
    """The other process, from the side of the one that starts it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz_elsewhere"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": HASHES},
        )

    def play(self, run: Played, directory: Path) -> None:
        """Play there as the calm run was played here. Raise RuntimeError with its error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([run.tables, str(directory)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer.strip() != '""':
            raise RuntimeError(json.loads(answer) if answer else "the other process is gone")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def elsewhere() -> Iterator[Play]:
    """Context manager: a way to play experiments in another process, which ends with the block."""
    process = Elsewhere()
    try:
        yield process.play
    finally:
        process.end()


def main() -> None:
    """Play the experiments that come."""
    answers = os.fdopen(os.dup(1), "w")
    # What is printed during a run is no answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        tables: Tables
        tables, directory = json.loads(line)
        error = ""
        try:
            play(tables, Path(directory))
        except Exception as raised:  # noqa: BLE001 (it is told)
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    from rayfl.determinism.process import prepare_process

    prepare_process()
    main()
