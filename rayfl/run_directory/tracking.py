"""Send the rounds of a run to the trackers that its experiment names. An error of a tracker never ends the run."""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType

import pyarrow.compute as pc

from rayfl.errors import log
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.description import TOML, read_experiment
from rayfl.run_directory.record import read_records
from rayfl.run_directory.trackers.tracker import TrackedRun, Tracker, TrackerName

_LONGEST_REASON = 300


class Tracking(AbstractContextManager["Tracking"]):
    """The trackers of one run. After a tracker's first error, rayfl prints one warning and stops using that tracker.

    Trackers start when there is something to send, because loading their packages takes a second and would delay the
    first round.
    """

    def __init__(self, directory: Path, names: Collection[TrackerName]) -> None:
        """Prepare to start or resume the named trackers."""
        self._directory = directory
        self._names = tuple(dict.fromkeys(names))
        self._trackers: dict[str, Tracker] = {}
        self._total_bits = 0

    def _begin(self, until: int = sys.maxsize) -> None:
        """Begin or resume in every tracker, once; the rounds before `until` are on record."""
        names, self._names = self._names, ()
        if not names:
            return
        rounds = read_records(self._directory, "rounds").filter(pc.field("round") < until)
        self._total_bits = sum(sum(rounds[name].to_pylist()) for name in ("uplink_bits", "downlink_bits"))
        for name in names:
            self._tolerating(name, lambda name=name: self._open(name, len(rounds)))

    def _open(self, name: TrackerName, num_recorded: int) -> None:
        run = TrackedRun(self._directory, read_experiment(self._directory), (self._directory / TOML).read_text("utf-8"))
        # Each loads its own package.
        if name == "wandb":
            from rayfl.run_directory.trackers.wandb_run import WandbRun as Adapter
        else:
            from rayfl.run_directory.trackers.tensorboard_events import TensorBoard as Adapter
        self._trackers[name] = Adapter(run, num_recorded)

    def round(self, row: RoundRow, means: Mapping[str, float]) -> None:
        """Send a round, which is on record, to every tracker."""
        self._begin(until=row.round)
        self._total_bits += row.uplink_bits + row.downlink_bits
        values = {
            **means,
            "communication/uplink_bits": row.uplink_bits,
            "communication/downlink_bits": row.downlink_bits,
            "communication/total_megabytes": self._total_bits / 8e6,
            "clients/selected": row.selected,
            "clients/delivered": row.delivered,
            "time/simulated_s": row.simulated_s,
            "time/wall_s": row.wall_s,
        }
        self._each(lambda tracker: tracker.round(row.round, values))

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
                "tracker %s has failed and is not used any more (%s); the run continues, and its records are complete",
                name,
                " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON],
            )
            if (tracker := self._trackers.pop(name, None)) is not None:
                with suppress(Exception):
                    tracker.close(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close(error is None))
        self._trackers.clear()
