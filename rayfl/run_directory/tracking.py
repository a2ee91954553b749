"""Send the rounds of a run to the trackers that its experiment names. An error of a tracker never ends the run.

    trackers.json        for each tracker whose run must be found again: where it lies, its name, the next round to send

Every round is sent once, under its number as the step. Rounds that are played again after a crash are not sent again,
since they have the same values. Rounds that a tracker lacks, because it failed or was not asked for, are sent from the
records when the run is resumed. A crash between a round's values and the note of it sends that round twice, with the
same values under the same step. A tracker that writes in a process or thread of its own, as W&B and TensorBoard, can
lose the last rounds before a kill.
"""

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType

import pyarrow.compute as pc

from rayfl.limits.json_files import read_json
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.disk import write_json
from rayfl.run_directory.record import recorded_rounds
from rayfl.run_directory.tables import read_records
from rayfl.run_directory.trackers.tracker import Mark, Status, TrackedRun, Tracker, TrackerName, adapter

log = logging.getLogger("rayfl")

MARKS = "trackers.json"
_LONGEST_REASON = 300


class Stopped(Exception):
    """The run was asked to end before its last round; it can be resumed."""


class Tracking(AbstractContextManager["Tracking"]):
    """The trackers of one run. After a tracker's first error, rayfl prints one warning and stops using that tracker.

    Trackers start when there is something to send, because loading their packages takes a second and would delay the
    first round.
    """

    def __init__(self, directory: Path, names: Collection[TrackerName]) -> None:
        """Prepare to start or resume the named trackers."""
        self._directory, self._names = directory, tuple(names)
        self._trackers: dict[str, Tracker] = {}
        self._marks: dict[str, Mark] = {}
        self._total_bits = 0

    def _begin(self, until: int = sys.maxsize) -> None:
        """Begin or resume in every tracker, once, and send it the recorded rounds before `until` that it lacks."""
        names, self._names = self._names, ()
        if not names:
            return
        self._marks = _read_marks(self._directory / MARKS)
        rounds = read_records(self._directory, "rounds").filter(pc.field("round") < until)
        self._total_bits = sum(sum(rounds[name].to_pylist()) for name in ("uplink_bits", "downlink_bits"))
        for name in names:
            self._tolerating(name, lambda name=name: self._open(name, len(rounds)))
        self._write_marks()

    def _open(self, name: str, num_recorded: int) -> None:
        """Begin or resume in a tracker, and send it those of the first `num_recorded` rounds that it lacks."""
        tracker = self._trackers[name] = adapter(name)(
            TrackedRun.read(self._directory), self._marks.get(name), num_recorded
        )
        if tracker.next_round < num_recorded:
            bits = 0
            for row, means in islice(recorded_rounds(self._directory), num_recorded):
                bits += row.uplink_bits + row.downlink_bits
                self._send(tracker, row, means, bits)

    def round(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """Send a round, which is on record, to every tracker."""
        self._begin(until=row.round)
        if self._trackers:
            self._total_bits += row.uplink_bits + row.downlink_bits
            self._each(lambda tracker: self._send(tracker, row, means, self._total_bits))
            self._write_marks()

    def _send(self, tracker: Tracker, row: RoundRow, means: Mapping[str, float], total_bits: int) -> None:
        """Send a round to a tracker unless it has the round."""
        if row.round >= tracker.next_round:
            tracker.round(row.round, {**means, **_communication(row, total_bits)})
            tracker.next_round = row.round + 1

    def model(self, path: Path) -> None:
        """Hand a final model to every tracker."""
        self._begin()
        self._each(lambda tracker: tracker.model(path))

    def _each(self, act: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._tolerating(name, lambda tracker=tracker: act(tracker))

    def _tolerating(self, name: str, act: Callable[[], object]) -> None:
        """Do something with a tracker. If that fails, stop using the tracker."""
        try:
            act()
        # Trackers raise errors of many libraries, and none of them is worth a run.
        except Exception as error:  # noqa: BLE001
            log.warning(
                "tracker %s has failed and is not used any more (%s); the run goes on, its records are complete, and "
                "rayfl resume sends what the tracker lacks",
                name,
                " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON],
            )
            self._write_marks()
            if (tracker := self._trackers.pop(name, None)) is not None:
                with suppress(Exception):
                    tracker.close("failed")

    def _write_marks(self) -> None:
        """Note the next round of every tracker whose run must be found again."""
        for name, tracker in self._trackers.items():
            if tracker.mark is not None:
                self._marks[name] = tracker.mark.model_copy(update={"next_round": tracker.next_round})
        if self._marks:
            with suppress(OSError):
                write_json(self._directory / MARKS, {name: mark.model_dump() for name, mark in self._marks.items()})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin()
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        status: Status = "finished" if error is None else "stopped" if stopped else "failed"
        self._each(lambda tracker: tracker.close(status))
        self._trackers.clear()


def _communication(row: RoundRow, total_bits: int) -> dict[str, float]:
    return {
        "communication/uplink_bits": row.uplink_bits,
        "communication/downlink_bits": row.downlink_bits,
        "communication/total_megabytes": total_bits / 8e6,
        "clients/selected": row.selected,
        "clients/delivered": row.delivered,
        "time/simulated_s": row.simulated_s,
        "time/wall_s": row.wall_s,
    }


def _read_marks(path: Path) -> dict[str, Mark]:
    """What earlier processes noted; {} if it cannot be read, and trackers then begin new runs with all rounds."""
    if not path.exists():
        return {}
    try:
        return {name: Mark(**mark) for name, mark in read_json(path).items()}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s): trackers begin new runs, with all rounds", path, error)
        return {}
