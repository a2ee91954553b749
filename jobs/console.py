"""The progress of a run: a live bar on a terminal, otherwise a line per round; and its log."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from logging import INFO, Handler, LogRecord

from jobs.display import STOPPING, Display, ProgressLine, say
from jobs.failures import INTERRUPTED, LIMIT
from rayfl.errors import log
from rayfl.metrics.facts import RECORDED_BEFORE, Facts
from rayfl.report.wording import megabytes
from rayfl.rounds.executor import Wave
from rayfl.rounds.ledger import OnRound, RoundRow

PLACES = ("pooled", "own", "unseen", "personal_pooled", "own_after_training")
"""Where models are evaluated, the most important place first."""


@dataclass(frozen=True)
class Audience:
    """Who follows a run.

    display: the live area of the command. If it is not live, a line per round is printed; if it is hidden, nothing is,
    not even the log. on_round: called with every round's row and means; if it raises, the run
    ends and can be resumed. stopping: asked after each round; if it returns true, the run ends as after a first Ctrl-C.
    began: when the command began, by `time.monotonic`; `runtime.limit_s` counts from then.
    """

    on_round: OnRound = lambda row, means: None
    stopping: Callable[[], bool] = lambda: False
    display: Display = field(default_factory=Display)
    began: float = field(default_factory=time.monotonic)

    def is_over(self, limit_s: float | None) -> bool:
        """Whether the command has taken `limit_s` seconds."""
        return limit_s is not None and time.monotonic() - self.began >= limit_s

    def stopped(self, limit_s: float | None) -> tuple[str, int]:
        """The beginning of a sentence on a command that did not finish, and its exit code."""
        if self.is_over(limit_s):
            return f"stopped by runtime.limit_s={limit_s:g}", LIMIT
        return "stopped", INTERRUPTED


_WAVES = {"train": "client", "evaluate": "evaluating client", "reply": "answering client", "mix": "mixing client"}
"""The words for each kind of wave."""


class Follower:
    """Shows the progress of a run on a bar: the round, its clients, the first metric and the megabytes sent.

    line: the bar. rounds: of the whole run. prints: whether to print a line per round as well. facts: those of every
    value that is evaluated.
    """

    def __init__(self, line: ProgressLine, rounds: int, prints: bool, facts: Mapping[str, Facts]) -> None:
        self.line = line
        self.rounds = rounds
        self.prints = prints
        self.facts = facts
        self.done = 0
        self.stops = False
        self.means: dict[str, float] = {}
        self.sent: dict[int, int] = {}
        self.show("starting")

    def __call__(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """Show a round that has ended."""
        if self.prints:
            say(line(row, means, self.rounds, self.facts))
        # By round, because a run that goes back to its last checkpoint reports some rounds again.
        self.sent[row.round] = row.uplink_bits + row.downlink_bits
        self.done = row.round + 1
        # Rounds without evaluation keep the last values.
        self.means.update(means)
        self.show(f"round {self.done}/{self.rounds}")

    def wave(self, wave: Wave) -> None:
        """Show the number of clients that are done in the current round, at most some hundred times."""
        if wave.total and wave.kind in _WAVES and wave.done % -(-wave.total // 500) == 0:
            self.show(f"round {self.done + 1}/{self.rounds}", f"{_WAVES[wave.kind]} {wave.done} of {wave.total}")

    def stopping(self) -> None:
        """Show that the run was asked to end after its round."""
        self.stops = True
        self.show(STOPPING)

    def close(self) -> None:
        """Show the number of rounds done."""
        self.stops = False
        self.show(f"round {self.done}/{self.rounds}")
        self.line.finish()

    def show(self, words: str, wave: str = "") -> None:
        """Show these words, or that the run stops, then the first metric so far, the wave, and the other numbers."""
        numbers = (
            [*headline(self.means, self.facts).split("  "), megabytes(sum(self.sent.values()) / 8e6)]
            if self.sent
            else []
        )
        parts = [STOPPING if self.stops else words, *numbers[:1], wave, *numbers[1:]]
        self.line.update(self.done, "  ".join(filter(None, parts)))


@contextmanager
def following(
    rounds: int, title: str, audience: Audience, facts: Mapping[str, Facts] = RECORDED_BEFORE
) -> Iterator[Follower]:
    """Show the progress and the log of a run to its audience. Yields the object to call with every round."""
    display = audience.display
    with (
        nullcontext() if display.hidden else logged(),
        closing(Follower(display.line(title, rounds), rounds, not (display.hidden or display.live), facts)) as follower,
    ):
        yield follower


class _Lines(Handler):
    """Prints log records; on a terminal they appear above the live area."""

    def emit(self, record: LogRecord) -> None:
        """As logging's."""
        say(self.format(record))


@contextmanager
def logged() -> Iterator[None]:
    """Print rayfl's log records, unless the program has set up logging itself."""
    if log.hasHandlers():
        yield
        return
    before = (log.level, log.propagate)
    handler = _Lines()
    log.addHandler(handler)
    log.setLevel(log.level or INFO)
    # So that nothing is shown twice if a package gives the root logger a handler meanwhile.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def line(row: RoundRow, means: Mapping[str, float], rounds: int, facts: Mapping[str, Facts] = RECORDED_BEFORE) -> str:
    """One round as one line of a log."""
    return (
        f"{row.round + 1}/{rounds} rounds  {headline(means, facts)}  "
        f"delivered {row.delivered}/{row.selected}  up {megabytes(row.uplink_bits / 8e6)}  "
        f"down {megabytes(row.downlink_bits / 8e6)}  {row.wall_s:.2f} s"
    )


def headline(means: Mapping[str, float], facts: Mapping[str, Facts]) -> str:
    """The one or two most important values of a round, and that of the clients that no round asks, in words: those of
    the first metric that ranks runs."""
    first = ([what for what, value_facts in facts.items() if value_facts.ranks] or [*facts])[:1]
    names = [name for what in first for place in PLACES if (name := f"{place}/{what}") in means]
    unseen = any(name.startswith("unseen/") for name in names)
    names = names[: 3 if unseen else 2] or [name for name in ("train/loss",) if name in means]
    return "  ".join(f"{name} {means[name]:.4f}" for name in names) or "not evaluated"
