"""What a command shows: text and tables on standard output, to any terminal, and after the reader has left, as `head`
does; and its live area, with the current step, the rounds of a run, the runs of a sweep.

On a terminal rich draws one area, below which nothing is printed. A notebook, a file or a pipe gets nothing. This
module loads neither torch nor Ray, so the area appears before they are loaded.
"""

import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from rayfl.errors import one_line, printable
from rayfl.untyped import Foreign


class _Patient(FileIO):
    """A file that drops what is written once nobody reads it any more."""

    def write(self, data: Foreign, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def serve_any_reader() -> None:
    """Let standard output and errors outlive their reader, and show any character in any encoding.

    So `rayfl run | head -2` plays to its end, and a name in Greek ends no run on a terminal that has only ASCII.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The caller has closed it.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            continue
        stream.flush()
        file = BufferedWriter(_Patient(stream.fileno(), "w", closefd=False))
        setattr(sys, name, TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True))


def first_sentence(text: str) -> str:
    """The first sentence of a text, in one line; "" if there is none."""
    words = " ".join(text.split())
    # "..." does not end a sentence.
    return re.split(r"(?<=[^.\s])\.\s", words)[0].rstrip(".") + "." * bool(words)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text, by default to standard output. Characters that would command a terminal are escaped."""
    print(printable(text), file=stream, flush=True)


def line_width(width: int) -> int:
    """The letters of a line: of the terminal, or `width` if the output is a file."""
    return Console().width if sys.stdout.isatty() else width


def print_table(table: Table, width: int = 110) -> None:
    """Print a table as wide as the terminal, or `width` letters wide if the output is a file; escaped as by `say`."""
    # On standard output, because rich draws a table in ASCII if the encoding has no other lines.
    console = Console(width=line_width(width), color_system=None, markup=False, force_jupyter=False)
    with console.capture() as text:
        console.print(table)
    say(text.get().removesuffix("\n"))


STOPPING = "stopping after this round; Ctrl-C: now"
_WIDE = 70
"""Columns from which on rows have a title and a bar."""


@dataclass(frozen=True)
class ProgressLine:
    """A bar with a title and words beside it.

    update: changes the completed part and the words; two spaces separate the parts of the words, the most important
    first. A signal's handler may call this. finish: stops the clock of the bar; on a terminal the bar disappears when
    the next one begins.
    """

    update: Callable[[float, str], object]
    finish: Callable[[], object]


class Display(AbstractContextManager["Display"]):
    """The live area of a command. It begins with the first stage or line and ends with `close`.

    stage: the words of the first stage. hidden: the user wants to see nothing. live: whether anything is shown; False
    for a file, a pipe, a notebook, and a terminal that cannot rewrite its lines.
    """

    def __init__(self, stage: str | None = None, console: Console | None = None, hidden: bool = False) -> None:
        self._console = console or Console()
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter
        self.hidden = hidden
        self.live = terminal and not hidden
        # Rounds may take minutes; by default rich forgets a step after 30 s.
        self._progress = Progress(
            *_columns(self._console.width),
            console=self._console,
            speed_estimate_period=math.inf,
            disable=not self.live,
            expand=True,
        )
        self._stage: TaskID | None = None
        if stage is not None:
            self.stage(stage)

    def stage(self, words: str) -> None:
        """Show the current step and its seconds until the next stage or line."""
        self._end_stage()
        self._stage = self._progress.add_task("", total=None, words=one_line(words))
        self._progress.start()

    def line(self, title: str, total: float | None) -> ProgressLine:
        """Add a bar; total: None if it is unknown."""
        self._end_stage()
        # Bars that have ended go: a sweep has many runs.
        for task in self._progress.tasks:
            if task.stop_time is not None:
                self._progress.remove_task(task.id)
        self._progress.start()
        task = self._progress.add_task(one_line(title), total=total, words="")

        def update(completed: float, words: str) -> None:
            self._progress.update(task, completed=completed, words=one_line(words))

        return ProgressLine(update, partial(self._progress.stop_task, task))

    def close(self) -> None:
        """End the live area. Bars remain visible, a stage does not."""
        self._end_stage()
        if self.live:
            # An area without bars would leave an empty line.
            self._progress.live.transient = not self._progress.task_ids
            self._progress.stop()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._progress.remove_task(self._stage)
            self._stage = None


def _columns(width: int) -> list[ProgressColumn]:
    """The columns of a terminal: a narrow one has no room for titles and bars, and words are cut where it ends."""
    narrow = Column(max_width=width // 6, no_wrap=True, overflow="ellipsis")
    title = TextColumn("{task.description}", markup=False, table_column=narrow)
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    words = TextColumn("{task.fields[words]}", markup=False, table_column=rest)
    wide = [title, BarColumn(width // 8)] if width >= _WIDE else []
    return [*wide, words, TimeElapsedColumn(), TimeRemainingColumn()]


class Overall:
    """Shows on a sweep's live area how many of its runs have ended."""

    def __init__(self, display: Display, runs: int) -> None:
        self._line = display.line("all runs", runs)
        self._runs = runs
        self._ended = 0
        self._line.update(0, f"0 of {runs} runs")

    def over(self) -> None:
        """Show that another run has ended, finished or not."""
        self._ended += 1
        self._line.update(self._ended, f"{self._ended} of {self._runs} runs")

    def stopping(self) -> None:
        """Show that the current runs end after their rounds. A signal's handler calls this."""
        self._line.update(self._ended, "stopping after the current rounds; Ctrl-C again stops now")
