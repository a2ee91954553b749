"""How long a run will still take: rounds that evaluate and rounds that do not have a mean each."""

import time
from collections.abc import Callable


class TimeLeft:
    """Seconds until a run of `rounds` rounds ends, which evaluates after every so many (0: after the last alone)."""

    def __init__(self, rounds: int, every: int, now: Callable[[], float] = time.monotonic) -> None:
        self._rounds, self._every, self._now = rounds, every, now
        self._seconds: dict[bool, list[float]] = {True: [0, 0.0], False: [0, 0.0]}
        self._ends: float | None = None

    def add(self, round: int, seconds: float) -> None:
        """A round has taken so long."""
        sums = self._seconds[self._evaluates(round)]
        sums[0] += 1
        sums[1] += seconds
        rest = self._rounds - round - 1
        evaluating = self._num_evaluating(self._rounds) - self._num_evaluating(round + 1)
        means = {kind: total / count for kind, (count, total) in self._seconds.items() if count}
        # A kind that has not come yet is taken for the other.
        known = next(iter(means.values()))
        left = evaluating * means.get(True, known) + (rest - evaluating) * means.get(False, known)
        self._ends = self._now() + left

    def __call__(self) -> float | None:
        """The seconds left from now on; None before the first round."""
        return None if self._ends is None else max(0.0, self._ends - self._now())

    def _evaluates(self, round: int) -> bool:
        return self._num_evaluating(round + 1) > self._num_evaluating(round)

    def _num_evaluating(self, rounds: int) -> int:
        """Rounds that evaluate among the first so many."""
        regular = rounds // self._every if self._every else 0
        last = rounds == self._rounds and (not self._every or rounds % self._every)
        return regular + bool(last)
