"""Tracking: the rounds of a run go to the trackers that it asks for. An error of a tracker never ends the run.

    trackers.json        for each tracker whose run must be found again: where it lies, its name, the next round to send

Every round is sent once, under its number as the step. Rounds that are played again after a crash are not sent again,
since they have the same values. Rounds that a tracker lacks, because it failed or was not asked for, are sent from the
records when the run is resumed. A crash between a round's values and the note of it sends that round twice, with the
same values under the same step. A tracker that writes in a process or thread of its own, as W&B and TensorBoard, can
lose the last rounds before a kill.
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from rayfl.limits import json_files
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.description import TOML, read_experiment
from rayfl.run_directory.record import recorded_rounds
from rayfl.run_directory.tables import read_records
from rayfl.run_directory.trackers.tracker import Mark, Status, TrackedRun, Tracker, TrackerName, adapter

log = logging.getLogger("rayfl")

MARKS = "trackers.json"
_LONGEST_REASON = 300


class Stopped(Exception):
    """The run was asked to end before its last round; it can be resumed."""


class Tracking:
    """The trackers of one run. After a tracker's first error, rayfl prints one warning and stops using that tracker.

    Trackers start when there is something to send, because loading their packages takes a second and would delay the
    first round.
    """

    def __init__(self, directory: Path, names: Collection[TrackerName]) -> None:
        """Prepare to start or resume the named trackers. Raise RayflError if the directory has no experiment."""
        self._directory, self._names = directory, tuple(names)
        self._trackers: dict[str, Tracker] = {}
        self._marks: dict[str, Mark] = {}
        if not names:
            return
        self._marks = _read_marks(directory / MARKS)
        self._run, rounds = tracked_run(directory), read_records(directory, "rounds")
        self._num_recorded = len(rounds)
        self._total_bits = sum(int(rounds[name].to_numpy().sum()) for name in ("uplink_bits", "downlink_bits"))

    def _begin(self) -> None:
        """Begin or go on in every tracker, once."""
        names, self._names = self._names, ()
        for name in names:
            self._tolerating(name, lambda name=name: self._open(name, self._run, self._num_recorded))
        if names:
            self._write_marks()

    def _open(self, name: str, run: TrackedRun, num_recorded: int) -> None:
        """Begin or go on in a tracker, and send it the recorded rounds that it lacks."""
        tracker = adapter(name)(run, self._marks.get(name), num_recorded)
        self._trackers[name] = tracker
        if tracker.next_round < num_recorded:
            for round, values in self._recorded:
                self._send(tracker, round, values)

    @cached_property
    def _recorded(self) -> list[tuple[int, Mapping[str, float]]]:
        """The rounds that were on record when this process began, with the values that trackers get."""
        found, bits = [], 0
        for row, means in islice(recorded_rounds(self._directory), self._num_recorded):
            bits += row.uplink_bits + row.downlink_bits
            found.append((row.round, {**means, **_communication(row, bits)}))
        return found

    def round(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """Send a round to every tracker."""
        self._begin()
        if not self._trackers:
            return
        self._total_bits += row.uplink_bits + row.downlink_bits
        values = {**means, **_communication(row, self._total_bits)}
        self._each(lambda tracker: self._send(tracker, row.round, values))
        self._write_marks()

    def _send(self, tracker: Tracker, round: int, values: Mapping[str, float]) -> None:
        """Send a round to a tracker unless it has it."""
        if round >= tracker.next_round:
            tracker.round(round, values)
            tracker.next_round = round + 1

    def model(self, path: Path) -> None:
        """Hand a final model to every tracker."""
        self._begin()
        self._each(lambda tracker: tracker.model(path))

    def _each(self, act: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._tolerating(name, lambda tracker=tracker: act(tracker))

    def _tolerating(self, name: str, act: Callable[[], object]) -> None:
        """Do something with a tracker, and leave it aside if that fails."""
        try:
            act()
        # Trackers raise errors of many libraries, and none of them is worth a run.
        except Exception as error:  # noqa: BLE001
            words = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
            log.warning(
                "tracker %s has failed and is left aside (%s); the run goes on, its records have everything, and "
                "rayfl resume sends what the tracker lacks",
                name,
                words,
            )
            if (tracker := self._trackers.pop(name, None)) is not None:
                self._note(name, tracker)
                with suppress(Exception):
                    tracker.close("failed")

    def _note(self, name: str, tracker: Tracker) -> None:
        if tracker.mark is not None:
            self._marks[name] = tracker.mark.model_copy(update={"next_round": tracker.next_round})

    def _write_marks(self) -> None:
        """Note how far the trackers are. Not synced: after a loss of power some rounds may be sent again."""
        for name, tracker in self._trackers.items():
            self._note(name, tracker)
        if not self._marks:
            return
        partial = self._directory / f"{MARKS}.partial"
        with suppress(OSError):
            # What a kill left; a link there must not lead the writing elsewhere.
            partial.unlink(missing_ok=True)
            partial.write_text(
                json.dumps({name: mark.model_dump() for name, mark in self._marks.items()}, indent=2) + "\n"
            )
            os.replace(partial, self._directory / MARKS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin()
        status: Status = "failed"
        if error is None:
            status = "finished"
        elif isinstance(error, Stopped | KeyboardInterrupt):
            status = "stopped"
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


def tracked_run(directory: Path) -> TrackedRun:
    """The run in a directory as trackers show it. Raise RayflError or OSError if its experiment cannot be read."""
    experiment = read_experiment(directory)
    output = experiment.get("output")
    settings = output if isinstance(output, Mapping) else {}
    return TrackedRun(
        directory=directory,
        name=directory.name,
        project=str(experiment.get("name", directory.name)),
        group=settings.get("group"),
        tags=settings.get("tags") or (),
        experiment=experiment,
        text=(directory / TOML).read_text(encoding="utf-8"),
    )


def _read_marks(path: Path) -> dict[str, Mark]:
    """What earlier processes noted; where it cannot be read, trackers begin anew and get all rounds."""
    if not path.exists():
        return {}
    try:
        return {name: Mark(**mark) for name, mark in json_files.read_json(path).items()}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s): trackers begin new runs, with all rounds", path, error)
        return {}
