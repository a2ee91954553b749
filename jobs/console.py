"""What a run shows while it runs: a live bar on a terminal or in a notebook, else a line a round, and its log."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from logging import INFO, Handler, getLogger
from pathlib import Path
from typing import Literal

from jobs.display import STOPPING, Display, Line
from jobs.run_tables import result_table
from jobs.standard_output import print_table
from rayfl.report.summary import Summary
from rayfl.rounds.executor import Wave
from rayfl.rounds.ledger import OnRound, RoundRow

HEADLINES = ("pooled/accuracy", "own/accuracy", "personal_pooled/accuracy", "own_after_training/accuracy", "train/loss")


Show = Literal["all", "bar", "nothing"]
"""all: a bar where the display is live, a line a round elsewhere; bar: the same without the lines."""


@dataclass(frozen=True)
class Audience:
    """Who follows a run.

    display: the live area of the command. on_round: called with every round's row and means; if it raises, the run
    ends and can be resumed. stopping: asked after each round; if it returns true, the run ends as after a first Ctrl-C.
    """

    show: Show = "all"
    on_round: OnRound = lambda row, means: None
    stopping: Callable[[], bool] = lambda: False
    display: Display = field(default_factory=lambda: Display(hidden=True))

    def stage(self, words: str) -> None:
        """Show the step before or after the rounds."""
        self.display.stage(words)


class Follower:
    """Base class of the progress displays: called at every event of a run, shows nothing."""

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """A round is over."""

    def wave(self, wave: Wave) -> None:
        """Some clients of the current round are done."""

    def stopping(self) -> None:
        """The run was asked to end after its round."""


class Lines(Follower):
    """Prints a line a round."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        print(line(row, means, self.rounds), flush=True)


_WAVES = {"train": "client", "evaluate": "evaluating client", "reply": "answering client", "mix": "mixing client"}
"""The words for each kind of wave."""


class Bar(Follower):
    """Shows a bar with the clients of the current round, the accuracy, and the bytes sent."""

    def __init__(self, line: Line, rounds: int) -> None:
        self.line, self.rounds = line, rounds
        self.done, self.stops = 0, False
        self.means: dict[str, float] = {}
        self.sent: dict[int, int] = {}
        self.show("starting")

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        # By round: a run that goes back to its last checkpoint reports some rounds again.
        self.sent[row.round] = row.uplink_bits + row.downlink_bits
        self.done = row.round + 1
        # Rounds without evaluation keep the last values.
        self.means.update(means)
        self.show(f"round {self.done}/{self.rounds}")

    def wave(self, wave: Wave) -> None:
        if wave.total and wave.kind in _WAVES:
            self.show(f"round {self.done + 1}/{self.rounds}, {_WAVES[wave.kind]} {wave.done} of {wave.total}")

    def stopping(self) -> None:
        self.stops = True
        self.show(STOPPING)

    def close(self) -> None:
        """Show the number of rounds done."""
        self.stops = False
        self.show(f"round {self.done}/{self.rounds}")
        self.line.finish()

    def show(self, words: str) -> None:
        """Show these words, or that the run stops, with the numbers so far."""
        numbers = f"  {headline(self.means)}  {megabytes(sum(self.sent.values()))}" if self.sent else ""
        self.line.update(self.done, (STOPPING if self.stops else words) + numbers)


@contextmanager
def following(rounds: int, title: str, audience: Audience) -> Iterator[Follower]:
    """Show the progress and the log of a run to its audience. Yields the object to call with every round."""
    if audience.show == "nothing":
        yield Follower()
        return
    display = audience.display
    with logging_to(display.handler()):
        if display.live:
            with closing(Bar(display.line(title, rounds), rounds)) as bar:
                yield bar
        else:
            yield Lines(rounds) if audience.show == "all" else Follower()


@contextmanager
def logging_to(handler: Handler) -> Iterator[None]:
    """Show rayfl's log records by `handler`, unless the program has set up logging itself."""
    log = getLogger("rayfl")
    if log.hasHandlers():
        yield
        return
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(log.level or INFO)
    # If a package gives the root logger a handler meanwhile, nothing is shown twice.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def line(row: RoundRow, means: Mapping[str, float], rounds: int) -> str:
    """One round as one line of a log."""
    return (
        f"{row.round + 1}/{rounds} rounds  {headline(means)}  "
        f"delivered {row.delivered}/{row.selected}  up {megabytes(row.uplink_bits)}  "
        f"down {megabytes(row.downlink_bits)}  {row.wall_s:.2f} s"
    )


def headline(means: Mapping[str, float]) -> str:
    """The one or two most telling values of a round."""
    accuracies = [name for name in HEADLINES if name in means and name.endswith("accuracy")][:2]
    names = accuracies or [name for name in HEADLINES if name in means][:1]
    return "  ".join(f"{name} {means[name]:.4f}" for name in names) or "not evaluated"


def megabytes(bits: float) -> str:
    """Bits as megabytes of 1e6 bytes."""
    return f"{bits / 8e6:.3f} MB"


def result(summary: Summary, report: Path | None) -> None:
    """Print the table that ends a run, and the paths of its directory and page."""
    print_table(result_table(summary), 100)
    print(f"run directory: {summary['directory']}")
    if report is not None:
        print(f"report:        {report}")
