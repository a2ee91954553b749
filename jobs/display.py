"""The live area of a command: the step under way, the rounds of a run, the runs of a sweep.

On a terminal rich draws one area, below which nothing is printed. A notebook, a file or a pipe gets nothing. This
module loads neither torch nor Ray, so the area appears before they are loaded.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from logging import Formatter, Handler, LogRecord, StreamHandler

from rich.cells import cell_len
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, Task, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rayfl.errors import one_line, printable

STOPPING = "stopping after this round; Ctrl-C again stops now"
_WIDE = 70
"""Columns from which on rows have a title and a bar."""
_TIME = len("00:00:00 left ")


@dataclass(frozen=True)
class Line:
    """A bar with a title and words beside it.

    update: changes the completed part and the words; two spaces separate the parts of the words, the most important
    first. A signal's handler may call this. finish: stops the clock of the bar; on a terminal the bar disappears when
    the next one begins.
    """

    update: Callable[[float, str], object]
    finish: Callable[[], object]


class Display(AbstractContextManager["Display"]):
    """The live area of a command. It begins with the first stage or line and ends with `close`.

    stage: the words of the first stage. hidden: show nothing. live: whether anything is shown; False for a file, a
    pipe, a notebook, and a terminal that cannot rewrite its lines.
    """

    def __init__(self, stage: str | None = None, console: Console | None = None, hidden: bool = False) -> None:
        self._console = console or Console()
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter
        self.live = terminal and not hidden
        # Rounds may take minutes; by default rich forgets a step after 30 s.
        self._progress = _Area(console=self._console, speed_estimate_period=math.inf, disable=not self.live)
        self._stage: TaskID | None = None
        if stage is not None:
            self.stage(stage)

    def stage(self, words: str) -> None:
        """Show the step under way and its seconds until the next stage or line."""
        self._end_stage()
        self._stage = self._progress.add_task("", total=None, words=one_line(words))
        self._progress.start()

    def line(self, title: str, total: float | None) -> Line:
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

        return Line(update, partial(self._progress.stop_task, task))

    def handler(self) -> Handler:
        """The handler that writes log records above the live area, or to standard output if there is no live area."""
        handler = StreamHandler(sys.stdout)
        if self.live:
            plain = {"show_time": False, "show_level": False, "show_path": False, "highlighter": NullHighlighter()}
            handler = RichHandler(console=self._console, **plain)
        handler.setFormatter(_Printable())
        return handler

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


class _Printable(Formatter):
    """Writes log records with characters that would command a terminal escaped."""

    def format(self, record: LogRecord) -> str:
        """As logging's."""
        return printable(super().format(record))


class _Area(Progress):
    """Progress in rows that fit the terminal: a narrow one has no room for the titles and the bars."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """As rich's, with the first parts of the words for which there is room."""
        table = Table.grid(padding=(0, 1))
        # rich asks for an empty table before it has a console.
        if not (tasks := list(tasks)):
            return table
        width = self.console.width
        # The first part of the words comes before all else.
        spare = width - max(cell_len(task.fields["words"].partition("  ")[0]) for task in tasks)
        has_title = width >= _WIDE and spare > width // 2
        for task in tasks:
            time = _Time().render(task) if spare > _TIME else Text()
            room = width - time.cell_len - 1
            cells = [time]
            if has_title:
                title = Text(task.description)
                title.truncate(width // 6, overflow="ellipsis")
                cells = [title, BarColumn(width // 8).render(task), time]
                room -= width // 6 + width // 8 + 2
            cells.insert(-1, _fitting(task.fields["words"].split("  "), room))
            table.add_row(*cells)
        return table


def _fitting(parts: Sequence[str], width: int) -> Text:
    """As many parts, from the first one on, as are whole within `width`; the first one may end in an ellipsis."""
    count = len(parts)
    while count > 1 and cell_len("  ".join(parts[:count])) > width:
        count -= 1
    text = Text("  ".join(parts[:count]))
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


class _Time(TimeRemainingColumn):
    """The time left; the time taken as long as that is unknown, and at the end."""

    def render(self, task: Task) -> Text:
        if task.finished or task.stop_time is not None or task.time_remaining is None:
            return TimeElapsedColumn().render(task)
        return super().render(task).append(" left")


class Overall:
    """Shows the progress of all runs of a sweep on its command's live area."""

    def __init__(self, display: Display, runs: int) -> None:
        self._display, self._runs = display, runs
        self._parts: dict[str, float] = {}
        self._own: dict[str, Line] = {}
        self._words = ""
        self._line = display.line("all runs", runs)
        self._show()

    def begin(self, title: str) -> None:
        """Show a run that has begun in a process of its own."""
        self._own[title] = self._display.line(title, None)

    def part(self, title: str, part: float) -> None:
        """Show that a run has done the fraction `part` of its rounds, from 0 to 1."""
        self._parts[title] = part
        self._show()

    def over(self, title: str) -> None:
        """Show that a run has ended, finished or not."""
        if title in self._own:
            self._own.pop(title).finish()
        self.part(title, 1.0)

    def stopping(self) -> None:
        """Show that the current runs end after their rounds. A signal's handler calls this."""
        self._words = "stopping after the current rounds; Ctrl-C again stops now"
        self._show()

    def _show(self) -> None:
        # A copy, because threads and a signal's handler change it at any moment.
        parts = list(self._parts.values())
        self._line.update(sum(parts), self._words or f"{sum(part == 1.0 for part in parts)} of {self._runs} runs")
