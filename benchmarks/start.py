"""The benchmark `start`: the seconds to the first line, the first round, the prompt, and a refusal.

Every command runs in its own process and terminal, as a user would type it. The terminal's output shows the stages, so
nothing is measured inside rayfl.
"""

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from actors.errors import ClusterError
from benchmarks.figures import Column, Figures, Results
from benchmarks.memory import descendants
from jobs.display import print_table
from jobs.shipped_experiments import experiment_file
from jobs.single import DRAWING
from rayfl.errors import RayflError

EXPERIMENT, ROUNDS = "demo", 3
END = "the prompt is back"
STAGES: Mapping[str, str] = {
    "the first line": r"\S",
    "reading the data": "reading the data",
    "starting Ray": "starting Ray",
    "starting actors": "starting (?!Ray)",
    "the first round is over": rf"round 1/{ROUNDS}\s\s",
    "the last round is over": rf"round {ROUNDS}/{ROUNDS}\s\s",
    "drawing the page": DRAWING,
}
"""The stages in their order, with the pattern that the terminal shows when a stage begins."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "rayfl --help": ["--help"],
    "rayfl methods fedavg": ["methods", "fedavg"],
    "a file that is not there": ["run", "demoo.toml"],
    "a setting that is not there": ["run", EXPERIMENT, "method.lrr=0.1"],
    "a method that is not there": ["run", EXPERIMENT, "method=fedavgg"],
    "a setting that does not fit the data": ["run", EXPERIMENT, "clients.count=100000"],
}
"""Commands that end at once, or are refused."""
_ESCAPES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
_LOOK_S = 0.1
"""Seconds between looks at the processor time of a run's processes. The last figure of a process counts."""


def bench_start(repeats: int, results: Results) -> None:
    """Measure all commands and runs of the demo, each `repeats` times; print three tables and write `results`.

    Raise RayflError for too few repeats and if `results` cannot be written; ClusterError if a run fails.
    """
    if repeats < 1:
        raise RayflError(f"--repeats {repeats} is not allowed; it must be a whole number of at least 1")
    results.require()
    figures = stages(repeats), commands(repeats), processes()
    for each in figures:
        print_table(each.table())
    print(f"Seconds since the command, median of {repeats} (the JSON file has all of them). `rayfl run {EXPERIMENT}`,")
    print(f"{ROUNDS} rounds, in a terminal. Processor time is that of one run more, up to the end of its first round.")
    results.write(*figures, repeats=repeats, cores=os.cpu_count())


def demo(scratch: str) -> list[str]:
    """The arguments of a run of the demo."""
    return ["run", str(experiment_file(Path(EXPERIMENT))), f"rounds={ROUNDS}", "--output", f"{scratch}/run"]


def run_demo(scratch: str) -> "Watched":
    """Run the demo. Raise ClusterError if it fails."""
    words = demo(scratch)
    watched = Watched(words, STAGES)
    watched.wait()
    if watched.code or END not in watched.seconds or len(watched.seconds) <= len(STAGES):
        raise ClusterError(f"rayfl {' '.join(words)} did not show all of its stages: {watched.last_line}")
    return watched


def stages(repeats: int) -> Figures:
    """Measure when each stage of a run begins."""
    columns = (
        Column("stage", "stage"),
        Column("median_s", "seconds", "{:.2f}"),
        Column("since_s", "since the stage before", "{:.2f}"),
        Column("seconds"),
    )
    rows: list[dict[str, float]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="start") as scratch:
            rows.append(run_demo(scratch).seconds)
    figures, before = Figures("stages", columns, title=f"rayfl run {EXPERIMENT}"), 0.0
    for stage in (*STAGES, END):
        seconds = [each[stage] for each in rows]
        figures.add(stage, median(seconds), median(seconds) - before, seconds)
        before = median(seconds)
    return figures


def commands(repeats: int) -> Figures:
    """Measure the time of each of COMMANDS."""
    columns = (
        Column("command", "command"),
        Column("median_s", "seconds", "{:.2f}"),
        Column("first_line_s", "to the first line", "{:.2f}"),
        Column("seconds"),
    )
    figures = Figures("commands", columns, title="Commands that end at once")
    for name, words in COMMANDS.items():
        rows: list[dict[str, float]] = []
        for _ in range(repeats):
            watched = Watched(words, {"the first line": r"\S"})
            watched.wait()
            rows.append(watched.seconds)
        first = median([each.get("the first line", each[END]) for each in rows])
        figures.add(name, median([each[END] for each in rows]), first, [each[END] for each in rows])
    return figures


def processes() -> Figures:
    """Measure the processor time of a run's processes up to the end of its first round."""
    columns = (
        Column("process", "process"),
        Column("count", "processes"),
        Column("cpu_s", "processor time, s", "{:.2f}"),
    )
    figures = Figures("processes", columns, title=f"rayfl run {EXPERIMENT}, to the end of its first round")
    with tempfile.TemporaryDirectory(prefix="start") as scratch:
        watched = Watched(demo(scratch), STAGES)
        seen: dict[int, tuple[str, float]] = {}
        while watched.alive and "the first round is over" not in watched.seconds:
            seen.update(processor_times(watched.process.pid))
            time.sleep(_LOOK_S)
        watched.wait()
    kinds = {kind for kind, _ in seen.values()}
    times = {kind: [seconds for process, seconds in seen.values() if process == kind] for kind in kinds}
    for kind in sorted(times, key=lambda name: -sum(times[name])):
        figures.add(kind, len(times[kind]), sum(times[kind]))
    return figures


class Watched:
    """The command `rayfl WORDS` in a terminal of its own.

    `seconds`: when each of `marks` was first seen, and when the command ended; `text`: everything that the terminal
    showed.
    """

    def __init__(self, words: Sequence[str], marks: Mapping[str, str]) -> None:
        self.marks = {name: re.compile(pattern) for name, pattern in marks.items()}
        self.seconds: dict[str, float] = {}
        self.text = ""
        self._terminal, terminal = pty.openpty()
        around = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
        self._begun = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *words],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=around,
            start_new_session=True,
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the command still runs."""
        return self._reader.is_alive()

    @property
    def code(self) -> int:
        """The exit code; waits for the end."""
        return self.process.wait()

    @property
    def last_line(self) -> str:
        """The last line that the terminal showed."""
        return ([""] + [line.strip() for line in re.split(r"[\r\n]+", self.text) if line.strip()])[-1]

    def wait(self) -> None:
        """Wait for the end of the command."""
        self._reader.join()

    def _read(self) -> None:
        ended = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready, _, _ = select.select([self._terminal, ended], [], [])
                now = time.perf_counter() - self._begun
                if self._terminal in ready and self._take(now):
                    continue
                if ended in ready:
                    self.seconds[END] = now
                    return
        finally:
            os.close(ended)
            os.close(self._terminal)

    def _take(self, now: float) -> bool:
        """Read the terminal's output. Return False at its end."""
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            # No process has the terminal open any more, so the command ends in a moment.
            time.sleep(0.001)
            return False
        self.text += _ESCAPES.sub("", data.decode(errors="replace"))
        for name, pattern in self.marks.items():
            if name not in self.seconds and pattern.search(self.text):
                self.seconds[name] = now
        return bool(data)


def processor_times(root: int) -> dict[int, tuple[str, float]]:
    """The kind and the processor time so far, in seconds, of `root` and every process below it, by process id."""
    times, tick = dict[int, tuple[str, float]](), os.sysconf("SC_CLK_TCK")
    for pid in descendants(root):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        times[pid] = kind(words), (int(stat[11]) + int(stat[12])) / tick
    return times


def kind(words: Sequence[str]) -> str:
    """The kind of a process, from its command line."""
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split(":")[-1].removeprefix("ray::")
    if "jobs.cli" in words:
        return "driver"
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    folders = [Path(word).parent.name for word in words if word.endswith("main.py")]
    return (folders or scripts or [Path(words[0]).name])[0]
