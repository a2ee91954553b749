"""The state of each run in a folder; nothing there is changed."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayfl.errors import RayflError
from rayfl.metrics.facts import ACCURACY, Facts
from rayfl.report.series import ranking_names, series
from rayfl.run_directory.disk import is_locked
from rayfl.run_directory.record import Run, read_run

State = Literal["finished", "running", "stopped", "unfinished", "damaged"]
"""`unfinished`: a copy in object storage, which does not say whether a process goes on with the run."""
PLACES = ("pooled", "own", "unseen")
"""The models that a list of runs shows: the global one, the clients', and those of clients that no round asks."""
_DEPTH = 3
"""The depth of folders in which runs are looked for: runs/SWEEP/RUN."""


@dataclass(frozen=True)
class Overview:
    """A run in a line.

    `planned`: the rounds of the whole run; `values`: the last value in each of `PLACES` where models are evaluated, by
    the first metric that ranks runs, whose `facts` are given; `age_s`: seconds since the run last recorded anything,
    infinite if that is unknown.
    """

    directory: Path
    state: State
    rounds: int
    planned: int | None
    values: Mapping[str, float]
    age_s: float
    facts: Facts = ACCURACY


def overviews(folder: Path) -> list[Overview]:
    """All runs in a folder and in the folders below, the latest first."""
    found = (path for depth in range(_DEPTH + 1) for path in sorted(folder.glob("*/" * depth + "experiment.json")))
    runs = [path.parent for path in found if path.is_file() and not path.parent.is_symlink()]
    return sorted(map(overview, runs), key=lambda one: one.age_s)


def overview(directory: Path) -> Overview:
    """The overview of the run in `directory`; a run that cannot be read is damaged."""
    changed = _last_change(directory)
    age = max(0.0, time.time() - changed) if changed else math.inf
    try:
        run = read_run(directory, leave_out=("clients",))
    except RayflError:
        return Overview(directory, "damaged", 0, None, {}, age)
    judged = [name.partition("/")[2] for name in ranking_names(run) if name.partition("/")[0] in PLACES][:1]
    last = {place: found.final for what in judged for place in PLACES if (found := series(run, f"{place}/{what}"))}
    rounds = planned if isinstance(planned := run.experiment.get("rounds"), int) else None
    return Overview(directory, state_of(run), len(run.rounds), rounds, last, age, *(run.facts[what] for what in judged))


def state_of(run: Run) -> State:
    """Whether a run is finished, is running in a process of this machine, or was stopped."""
    return "running" if is_locked(run.directory) else "finished" if run.finished else "stopped"


def _last_change(directory: Path) -> float:
    """When the records or the description of a run last changed, in seconds since 1970; 0 if there are none."""
    changed = [0.0]
    for path in (directory / "experiment.json", *(directory / "records").glob("*")):
        # A recorder may remove a file meanwhile.
        with suppress(OSError):
            changed.append(path.stat().st_mtime)
    return max(changed)
