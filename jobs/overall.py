"""The bar of a whole sweep, with a line for each run that is a process of its own."""

from jobs.display import Display, Line


class Overall:
    """Shows the progress of all runs of a sweep on its command's live area."""

    def __init__(self, display: Display, runs: int) -> None:
        self._display, self._runs = display, runs
        self._parts: dict[str, float] = {}
        self._own: dict[str, Line] = {}
        self._words = ""
        self._line = display.line("all runs", runs, in_notebook=False)
        self._show()

    def begin(self, title: str) -> None:
        """A process has begun this run."""
        self._own[title] = self._display.line(title, 1.0, in_notebook=False)
        self._own[title].update(0.0, "starting")

    def part(self, title: str, part: float, words: str = "") -> None:
        """A run has done this part of its rounds, from 0 to 1."""
        self._parts[title] = part
        if title in self._own:
            self._own[title].update(part, words)
        self._show()

    def over(self, title: str) -> None:
        """A run has ended, finished or not."""
        if title in self._own:
            self._own.pop(title).finish()
        self.part(title, 1.0)

    def stopping(self) -> None:
        """The current runs end after their rounds. A signal's handler calls this."""
        self._words = "stopping after the current rounds; Ctrl-C again stops now"
        self._show()

    def _show(self) -> None:
        # A copy, because threads and a signal's handler change it at any moment.
        parts = list(self._parts.values())
        over = sum(part == 1.0 for part in parts)
        self._line.update(sum(parts), self._words or f"{over} of {self._runs} runs")
