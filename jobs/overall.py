"""The one bar of a whole sweep, with a line for each run that is a process of its own."""

import time
from collections.abc import Callable

from jobs.display import Display, Line


class Overall:
    """How far all runs of a sweep have come, on the terminal of its command; nothing elsewhere."""

    def __init__(self, display: Display | None, runs: int, now: Callable[[], float] = time.monotonic) -> None:
        self._display = display if display is not None and display.live else None
        self._runs, self._now, self._began = runs, now, now()
        self._parts: dict[str, float] = {}
        self._own: dict[str, Line] = {}
        self._words = ""
        self._line = None if self._display is None else self._display.line("all runs", runs, self.left)
        self._show()

    @property
    def live(self) -> bool:
        """Whether anything is shown."""
        return self._display is not None

    def begin(self, title: str) -> None:
        """A process of its own has begun this run."""
        if self._display is not None:
            self._own[title] = self._display.line(title, 1.0)
            self._own[title].update(state="starting")

    def part(self, title: str, part: float, state: str = "") -> None:
        """A run has come so far, from 0 to 1."""
        self._parts[title] = part
        if title in self._own:
            self._own[title].update(part, state)
        self._show()

    def over(self, title: str) -> None:
        """A run has ended, however it did."""
        self._parts[title] = 1.0
        if (line := self._own.pop(title, None)) is not None:
            line.finish()
        if self._display is not None:
            self._display.remove_finished()
        self._show()
        if self._line is not None and self._done() == [1.0] * self._runs:
            self._line.finish()

    def stopping(self) -> None:
        """The runs under way end after their rounds. A signal's handler calls this."""
        self._words = "stopping after the rounds under way; Ctrl-C again stops now"
        self._show()

    def left(self) -> float | None:
        """Seconds until all runs are over, if the rest goes as fast as before."""
        done = sum(self._done())
        return (self._now() - self._began) / done * (self._runs - done) if done else None

    def _show(self) -> None:
        if self._line is not None:
            parts = self._done()
            over = sum(part == 1.0 for part in parts)
            self._line.update(sum(parts), self._words or f"{over} of {self._runs} runs")

    def _done(self) -> list[float]:
        """How far the runs are. A copy, because threads, a signal's handler and the terminal come at any moment."""
        return list(self._parts.values())
