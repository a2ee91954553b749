"""What moves on a terminal while a command works: what is being started, the round under way, the runs of a sweep.

All of it is one live area, below which nothing is printed; elsewhere than on a terminal nothing is shown. It loads
neither torch nor Ray, so that it is there before they are.
"""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

STOPPING = "stopping after this round; Ctrl-C again stops now"


class Line:
    """A line of the live area, with a bar where it has a `total`, and the seconds left that `left` returns."""

    def __init__(
        self, progress: Progress, title: str, total: float | None, left: Callable[[], float | None] | None
    ) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(title, total=total, state="", left=left)
        self.finished = False

    def update(self, completed: float | None = None, state: str | None = None, title: str | None = None) -> None:
        """Change what is given. The terminal follows a tenth of a second later: a signal's handler may call this."""
        self._progress.update(self._task, completed=completed, description=title)
        if state is not None:
            self._progress.update(self._task, state=state)

    def finish(self) -> None:
        """Stop its clock; the line stays when the area is closed."""
        self._progress.stop_task(self._task)
        self.finished = True

    def remove(self) -> None:
        """Take the line away."""
        self._progress.remove_task(self._task)


class Display:
    """The live area of a command, from `stage` or the first line on until `close`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        # A notebook's kernel has a bar of its own, and some terminals cannot change what they have shown.
        self.live = self._console.is_terminal and not self._console.is_dumb_terminal and not in_notebook()
        self._progress: Progress | None = None
        self._stage: Line | None = None
        self._lines: list[Line] = []

    def stage(self, words: str) -> None:
        """Say what is being started or drawn, and count the seconds, until the next stage or line."""
        if not self.live:
            return
        self._end_stage()
        self._stage = Line(self._running(), words, None, None)

    def line(self, title: str, total: float, left: Callable[[], float | None] | None = None) -> Line:
        """A new line with a bar."""
        self._end_stage()
        self._lines.append(Line(self._running(), title, total, left))
        return self._lines[-1]

    def remove_finished(self) -> None:
        """Take the lines away that are finished: a sweep has many runs."""
        for line in [line for line in self._lines if line.finished]:
            line.remove()
            self._lines.remove(line)

    def handler(self) -> RichHandler:
        """Writes what is logged above the live area."""
        return RichHandler(
            console=self._console, show_time=False, show_level=False, show_path=False, highlighter=NullHighlighter()
        )

    def close(self) -> None:
        """End the live area: bars stay, what was being started goes."""
        self._end_stage()
        if self._progress is not None:
            # An area without lines would leave an empty one.
            self._progress.live.transient = not self._progress.task_ids
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> Progress:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), _Bar(), TextColumn("{task.fields[state]}"), _Times())
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self._progress

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.remove()
            self._stage = None


class _Bar(ProgressColumn):
    """A bar, or nothing for what has no length."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn()

    def render(self, task: Task) -> RenderableType:
        """The column of a line."""
        return Text() if task.total is None else self._bar.render(task)


class _Times(ProgressColumn):
    """How long a line has been there, and how long it will be."""

    def render(self, task: Task) -> Text:
        """The column of a line."""
        words = clock(task.elapsed or 0.0)
        left = task.fields["left"]() if task.fields["left"] is not None and not task.stop_time else None
        return Text(words if left is None else f"{words}, about {clock(left)} left")


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"
