"""Availability: which clients can be reached in a round: at random, by time of day, or from a file.

A client's probability does not depend on other clients. Rounds count from 0.
"""

import csv
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.limits.regular_files import read_text, reading
from rayfl.population.distributions import Shares, values
from rayfl.settings import Settings, shown

COLUMNS = ("client", "first_round", "last_round")
"""The header of a trace."""

_EVER = 2**62
"""A round that no run reaches."""


class PerClient(Settings):
    """Each client can be reached in a round with its own probability."""

    probability: Shares = Field(description="probability of each client to be available in a round")

    def chances(self, count: int, seed: int, round_number: int) -> np.ndarray:
        """The probability that each client is available in this round, float64 [count]."""
        return values(self.probability, count, seed, "availability probability")


class Diurnal(Settings):
    """Day and night: the probability goes from `low` to `high` and back in `period` rounds, as a cosine.

    p_i(t) = low + (high - low) (1 + cos(2 pi (t / period - phase_i))) / 2 with phase_i uniform in [0, spread): clients
    all over the world (spread 1), or all in one time zone (spread 0).
    """

    period: float = Field(gt=0, description="rounds per day")
    low: float = Field(default=0.0, ge=0, le=1, description="probability by night")
    high: float = Field(default=1.0, ge=0, le=1, description="probability by day")
    spread: float = Field(default=1.0, ge=0, le=1, description="share of the day over which clients' noons are spread")

    @model_validator(mode="after")
    def _nights_are_quieter(self) -> Self:
        if self.low > self.high:
            raise RayflError(f"={self.low} is above high={self.high}; swap them", ("low",))
        return self

    def chances(self, count: int, seed: int, round_number: int) -> np.ndarray:
        """The probability that each client is available in this round, float64 [count]."""
        phases = self.spread * seeding.generator(seed, purpose="availability phase").random(count)
        daylight = (1 + np.cos(2 * np.pi * (round_number / self.period - phases))) / 2
        return self.low + (self.high - self.low) * daylight


class Trace(Settings):
    """A CSV file with the header `client,first_round,last_round`: a client is available in the rounds of its lines.

    Both ends are included; a client without a line is never available. With `repeat` the trace begins again
    after that number of rounds; without it no client is available after the last line's end.
    """

    trace: str = Field(min_length=1, description="path of the file")
    repeat: int | None = Field(default=None, ge=1, description="rounds after which it begins again")

    def read(self, count: int) -> "TraceLines":
        """The lines of the file for `count` clients. Raise RayflError for a file that is not a trace of them."""
        return TraceLines(read_trace(Path(self.trace), count), self.repeat)


@dataclass(frozen=True, eq=False)
class TraceLines:
    """A trace that was read: `lines` are int64 [num_lines, 3] with a client, its first and its last round."""

    lines: np.ndarray
    repeat: int | None = None

    def chances(self, count: int, seed: int, round_number: int) -> np.ndarray:
        """1 for the clients that are available in this round and 0 for the others, float64 [count]."""
        client, first, last = self.lines.T
        now = round_number if self.repeat is None else round_number % self.repeat
        chances = np.zeros(count)
        chances[client[(first <= now) & (now <= last)]] = 1.0
        return chances


Availability = PerClient | Diurnal | Trace


def available(model: PerClient | Diurnal | TraceLines | None, count: int, seed: int, round_number: int) -> np.ndarray:
    """Boolean [count]: the clients that can be reached in this round; all if `[clients]` has no availability."""
    if model is None:
        return np.ones(count, dtype=bool)
    return seeding.generator(seed, round_number, purpose="availability").random(count) < model.chances(
        count, seed, round_number
    )


def read_trace(path: Path, count: int) -> np.ndarray:
    """A trace's lines as int64 [num_lines, 3]: client, first and last round. Raise RayflError if the file is not a
    trace."""
    header = ",".join(COLUMNS)
    with reading(path, f"give a CSV file with the header {header}", csv.Error):
        rows = list(csv.reader(read_text(path).splitlines()))
    if not rows or tuple(cell.strip() for cell in rows[0]) != COLUMNS:
        raise RayflError(f"the trace {path} does not begin with the header {header}; add it")
    lines = [_line(path, line_number, row, count) for line_number, row in enumerate(rows[1:], start=2) if row]
    return np.array(lines, dtype=np.int64).reshape(-1, 3)


def _line(path: Path, line_number: int, row: list[str], count: int) -> tuple[int, int, int]:
    with suppress(ValueError):
        client, first, last = (int(cell) for cell in row)
        if 0 <= client < count and 0 <= first <= last:
            return client, min(first, _EVER), min(last, _EVER)
    raise RayflError(
        f"line {line_number} of the trace {path} is {shown(','.join(row))}; a line has a client from 0 to {count - 1} "
        "(clients.count, without the unseen ones), its first round, counted from 0, and its last one, such as 0,4,9"
    )
