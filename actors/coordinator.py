"""Coordinator: the Ray actor that plays an experiment. It owns the client actors, every state and the run directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

import ray

from actors.placement import Placement
from rayfl.process import settle, trim

if TYPE_CHECKING:
    from rayfl.ledger import RoundRecord
    from rayfl.record import RoundRow

_CONTROL = "control"
"""Calls of this group are answered while a run goes on."""


class Stopped(Exception):
    """The run was asked to end; raised between rounds."""


# Ray's type stubs know no concurrency groups.
@ray.remote(num_cpus=0, concurrency_groups={_CONTROL: 4})  # pyright: ignore[reportCallIssue]
class Coordinator:
    """Plays one experiment; `run` returns when it is over, the other methods answer meanwhile.

    What brings torch in is imported in the methods, because `settle` must come first.
    """

    def __init__(self) -> None:
        settle()
        self._changed = Condition()
        self._num_rounds = 0
        self._rounds: list[tuple[RoundRow, Mapping[str, float]]] = []
        self._started = self._stopping = self._over = self._trims = False

    def run(self, setup: Sequence[ray.ObjectRef], placement: Placement, directory: Path, save_models: bool) -> bool:
        """Play all rounds into `directory`. False if `stop` ended the run before its last round.

        `setup` is a reference in a list, which Ray leaves unresolved, so that torch is not loaded too early. Errors are
        those of `RayExecutor` and of `rayfl.play.play`.
        """
        from actors.pool import RayExecutor
        from rayfl.play import play

        try:
            executor = RayExecutor(setup[0], placement)
            try:
                value = ray.get(setup[0])
                self._num_rounds = value.rounds
                # States below 100 kB live in this process's heap, and the allocator keeps what the old ones leave.
                # Without states a trim would only make the next round fetch its working memory anew (W3: +40 %).
                self._trims = value.stateful or value.linked
                self._tell(started=True)
                play(value, executor, directory, self._record, save_models)
            except Stopped:
                return False
            finally:
                executor.close()
        finally:
            self._tell(over=True)
        return True

    @ray.method(concurrency_group=_CONTROL)
    def progress(self, after: int, timeout_s: float) -> tuple[bool, list[tuple["RoundRow", Mapping[str, float]]], bool]:
        """Whether the actors are ready, the rounds beyond the first `after` with their means, whether `run` is over.

        Waits until there is something new, for at most `timeout_s`.
        """
        with self._changed:
            started = self._started
            self._changed.wait_for(
                lambda: self._over or len(self._rounds) > after or self._started != started, timeout_s
            )
            return self._started, self._rounds[after:], self._over

    @ray.method(concurrency_group=_CONTROL)
    def stop(self) -> None:
        """End after the round that is being played."""
        self._stopping = True

    def _record(self, record: "RoundRecord") -> None:
        with self._changed:
            self._rounds.append((record.row, record.means))
            self._changed.notify_all()
        if self._trims:
            trim()
        if self._stopping and record.row.round + 1 < self._num_rounds:
            raise Stopped

    def _tell(self, started: bool = False, over: bool = False) -> None:
        with self._changed:
            self._started, self._over = self._started or started, self._over or over
            self._changed.notify_all()
