"""The state of each run in a folder; nothing there is changed."""

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from rayfl.errors import RayflError
from rayfl.report.comparison import TextTable
from rayfl.report.series import ranking_names, series
from rayfl.run_directory.disk import is_locked
from rayfl.run_directory.record import Run, read_run

State = Literal["finished", "running", "stopped", "unfinished", "damaged"]
"""`unfinished`: a copy in object storage, which does not say whether a process is continuing the run."""
PLACES = ("pooled", "own", "unseen")
"""The models that a list of runs shows: the global one, the clients', and those of clients that no round asks."""
_DEPTH = 3
"""The depth of folders in which runs are looked for: runs/SWEEP/RUN."""


def run_list(folder: Path) -> TextTable:
    """All runs in a folder and in the folders below, a row each, the latest first.

    Name, state, rounds, the last value in each of `PLACES` where models are evaluated, by the first metric that ranks
    runs, and when the run last recorded anything.
    """
    found = [path for depth in range(_DEPTH + 1) for path in sorted(folder.glob("*/" * depth + "experiment.json"))]
    runs = [path.parent for path in found if path.is_file() and not path.parent.is_symlink()]
    changed = {run: _last_change(run) for run in runs}
    rows = []
    for run in sorted(changed, key=changed.__getitem__, reverse=True):
        name = run.name if run == folder else run.relative_to(folder).as_posix()
        rows.append([name, *_overview(run), datetime.fromtimestamp(changed[run]).isoformat(" ", "minutes")])
    return TextTable(["run", "state", "rounds", *PLACES, "changed"], rows)


def _overview(directory: Path) -> list[str]:
    """State, rounds and values of a run; one that cannot be read is damaged."""
    try:
        run = read_run(directory, leave_out=("clients",))
    except RayflError:
        return ["damaged", "0/?", *[""] * len(PLACES)]
    judged = [name.partition("/")[2] for name in ranking_names(run) if name.partition("/")[0] in PLACES]
    last = [series(run, f"{place}/{judged[0]}") if judged else None for place in PLACES]
    values = ["" if one is None else run.facts[judged[0]].words(one.final) for one in last]
    return [state_of(run), f"{len(run.rounds)}/{run.experiment.get('rounds')}", *values]


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
