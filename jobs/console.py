"""What a run prints: a live bar on a terminal or a line a round in a job log, its log, and a table at the end."""

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from html import escape
from logging import INFO, Handler, StreamHandler, getLogger
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from actors.session import OnRound
from jobs.display import STOPPING, Display, in_notebook
from jobs.run_tables import result_table
from jobs.standard_output import print_table
from jobs.time_left import TimeLeft
from rayfl.report.summary import Summary
from rayfl.report.wording import counted, seconds
from rayfl.rounds.executor import Wave
from rayfl.rounds.ledger import RoundRow

HEADLINES = ("pooled/accuracy", "own/accuracy", "personal_pooled/accuracy", "own_after_training/accuracy", "train/loss")


Show = Literal["all", "bar", "nothing"]
"""all: a live bar in a terminal or a notebook, lines elsewhere; bar: the same without the lines."""


@dataclass(frozen=True)
class Audience:
    """Who follows a run. `on_round` gets every round's row and means; where it raises, the run ends, to be resumed.

    `stopping` is asked after each round: where it says so, the run ends as by a first Ctrl-C. `display`: the live area
    of the command that the run is part of.
    """

    show: Show = "all"
    on_round: OnRound = lambda row, means: None
    stopping: Callable[[], bool] = lambda: False
    display: Display | None = None

    def stage(self, words: str) -> None:
        """Show on the command's terminal what is being done before or after the rounds."""
        if self.display is not None:
            self.display.stage(words)


class Follower:
    """Takes in a run as it goes on, and shows nothing of it."""

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """A round is over."""

    def wave(self, wave: Wave) -> None:
        """Some clients of the round under way are done."""

    def stopping(self) -> None:
        """The run was asked to end after its round."""


class Lines(Follower):
    """A line a round."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        print(line(row, means, self.rounds), flush=True)


_WAVES = {"train": "client", "evaluate": "evaluating client", "reply": "answering client", "mix": "mixing client"}
"""What is done with the clients of a wave."""


class Standing(Follower, ABC):
    """How a run stands, in words: the clients of the round under way, accuracy, bytes, and the time left."""

    def __init__(self, rounds: int, every: int) -> None:
        self.rounds, self.done, self.words = rounds, 0, "starting"
        self.means: dict[str, float] = {}
        self.left = TimeLeft(rounds, every)
        self.sent: dict[int, int] = {}

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        # By round: a run that goes back to its last checkpoint reports some rounds again.
        self.sent[row.round] = row.uplink_bits + row.downlink_bits
        self.left.add(row.round, row.wall_s)
        self.done = row.round + 1
        # Rounds without evaluation keep the last values.
        self.means.update(means)
        if self.words != STOPPING:
            self.words = f"round {self.done}/{self.rounds}"
        self.show()

    def wave(self, wave: Wave) -> None:
        """Show which of the round's clients are done."""
        if wave.total and wave.kind in _WAVES and self.words != STOPPING:
            self.words = f"round {self.done + 1}/{self.rounds}, {_WAVES[wave.kind]} {wave.done} of {wave.total}"
            self.show_wave()

    def stopping(self) -> None:
        """Say so at once: a signal's handler calls this."""
        self.words = STOPPING
        self.show_wave()

    def close(self) -> None:
        """Show how far it came."""
        self.settle()
        self.show()

    def settle(self) -> None:
        """From now on the words say how far it came."""
        if self.done:
            self.words = f"round {self.done}/{self.rounds}"

    @property
    def text(self) -> str:
        """The words."""
        sent = f"{headline(self.means)}  {megabytes(sum(self.sent.values()))}" if self.sent else ""
        return "  ".join(filter(None, (self.words, sent)))

    @abstractmethod
    def show(self) -> None:
        """Show the words, and the rounds that are done."""

    def show_wave(self) -> None:
        """The same within a round, which may come often."""
        self.show()


class Bar(Standing):
    """A live bar on a terminal."""

    def __init__(self, display: Display, rounds: int, title: str, every: int) -> None:
        super().__init__(rounds, every)
        self.line = display.line(title, rounds, self.left)
        self.show()

    def show(self) -> None:
        """Change the line, which the terminal shows soon."""
        self.line.update(self.done, self.text)

    def close(self) -> None:
        """Let the bar stay as it is."""
        super().close()
        self.line.finish()


class NotebookBar(Standing):
    """The same in a notebook: one element of HTML that changes, and stays when the notebook is saved."""

    # Any: IPython is no dependency; where there is a notebook, there it is.
    def __init__(self, display: Any, rounds: int, title: str, every: int) -> None:
        super().__init__(rounds, every)
        self.title, self.began_s, self.shown_s = title, time.monotonic(), 0.0
        self.html_type = display.HTML
        self.shown = display.display(self.html_type(self.html(self.text)), display_id=True)

    def show(self) -> None:
        """Send the words, and how long it will be."""
        left_s, self.shown_s = self.left(), time.monotonic()
        words = self.text if left_s is None else f"{self.text}  about {seconds(left_s)} left"
        self.shown.update(self.html_type(self.html(words)))

    def show_wave(self) -> None:
        """Once a second: each is a message to the browser."""
        if time.monotonic() - self.shown_s >= 1:
            self.show()

    def stopping(self) -> None:
        """Say so with the next client: a signal's handler sends nothing."""
        self.words, self.shown_s = STOPPING, 0.0

    def close(self) -> None:
        """Show how far it came, and for how long it took."""
        self.settle()
        took = seconds(time.monotonic() - self.began_s)
        self.shown.update(self.html_type(self.html(f"{self.text}  {took}")))

    def html(self, words: str) -> str:
        """The bar and words beside it."""
        return (
            f'<div>{escape(self.title)} <progress value="{self.done}" max="{self.rounds}"></progress> '
            f"<span>{escape(words)}</span></div>"
        )


# Any: IPython's module of that name.
def notebook_display() -> Any:
    """`IPython.display` where this process is a notebook's kernel, which has loaded it; None elsewhere."""
    return sys.modules.get("IPython.display") if in_notebook() else None


@contextmanager
def following(
    rounds: int, title: str, show: Show = "all", display: Display | None = None, every: int = 1
) -> Iterator[Follower]:
    """Show progress and log: a bar with the log above it, or a line each where there is no terminal and no notebook.

    Yields what to call with every round. `display`: where the bar goes if the command has one; `every`: rounds from one
    evaluation to the next.
    """
    if show == "nothing":
        yield Follower()
        return
    if (notebook := notebook_display()) is not None:
        with logging_to(StreamHandler(sys.stdout)), closing(NotebookBar(notebook, rounds, title, every)) as bar:
            yield bar
        return
    with nullcontext(display) if display is not None else Display() as area:
        if not area.live:
            with logging_to(StreamHandler(sys.stdout)):
                yield Lines(rounds) if show == "all" else Follower()
            return
        with logging_to(area.handler()), closing(Bar(area, rounds, title, every)) as bar:
            yield bar


@contextmanager
def logging_to(handler: Handler) -> Iterator[None]:
    """Have `handler` show what rayfl logs, unless the program has set up logging of its own."""
    log = getLogger("rayfl")
    if log.hasHandlers():
        yield
        return
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(log.level or INFO)
    # A package that gives the root logger a handler meanwhile shows nothing twice.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


ROUND_LINE = re.compile(r"(\d+)/(\d+) rounds ")
"""How a `line` begins: rounds done, and all rounds."""


def line(row: RoundRow, means: Mapping[str, float], rounds: int) -> str:
    """One round as one line of a log."""
    return (
        f"{row.round + 1}/{rounds} rounds  {headline(means)}  "
        f"delivered {row.delivered}/{row.selected}  up {megabytes(row.uplink_bits)}  "
        f"down {megabytes(row.downlink_bits)}  {row.wall_s:.2f} s"
    )


def headline(means: Mapping[str, float]) -> str:
    """The one or two values that show best how a run is doing."""
    accuracies = [name for name in HEADLINES if name in means and name.endswith("accuracy")][:2]
    names = accuracies or [name for name in HEADLINES if name in means][:1]
    return "  ".join(f"{name} {means[name]:.4f}" for name in names) or "not evaluated"


def megabytes(bits: float) -> str:
    """Bits as megabytes of 1e6 bytes."""
    return f"{bits / 8e6:.3f} MB"


def result(summary: Summary, report: Path | None) -> None:
    """The table that ends a run, and where everything lies."""
    print_table(result_table(summary), 100)
    print(f"run directory: {summary['directory']}")
    if report is not None:
        print(f"report:        {report}")


def sweep_result(
    name: str,
    rows: Sequence[tuple[str, str, Summary | None]],
    directory: Path,
    page: Path | None,
    accuracies: Sequence[str],
) -> None:
    """The table that ends a sweep: title and status of every run, and the numbers of those that finished, with the
    first of their `accuracies`, which decides."""
    table = Table(title=f"{name}: {counted(len(rows), 'run')}", title_justify="left")
    evaluated = next(iter(accuracies), None)
    table.add_column("run", overflow="fold")
    for head in ("", *([f"final {evaluated}"] if evaluated else []), "uplink", "downlink"):
        table.add_column(head, justify="left" if not head else "right")
    for title, status, found in rows:
        cells = []
        if found:
            value = found["final"].get(evaluated or "")
            cells = [f"{100 * value:.2f} %" if value is not None else ""] if evaluated else []
            cells += [f"{found[key]:.3f} MB" for key in ("uplink_megabytes", "downlink_megabytes")]
        table.add_row(Text(title), status, *cells)
    print_table(table, 140)
    print(f"sweep directory: {directory}")
    if page is not None:
        print(f"comparison:      {page}")
