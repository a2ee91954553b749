"""rayfl from Python: `rayfl.run` and so on do what the commands do, without printed tables and exit codes.

An experiment is the path of its TOML file, the name of a shipped one, an `Experiment`, or keyword arguments alone.
Keyword arguments are the tables and settings of a file: `data="digits"`, `method={"name": "fedavg", "lr": 0.1}`, with
classes and objects in place of names. With a path or an `Experiment` they replace its settings, and so do overrides
("method.lr=0.1", as on the command line); `**{"method.lr": 0.1}` is that override with a Python value.

A user's mistake raises `rayfl.errors.RayflError`, a ValueError, with one sentence; an error in a client's code raises
`rayfl.errors.ClientError`, a failure of Ray `actors.errors.ClusterError`, and a failure of the disk
`rayfl.run_directory.disk.DiskError`. Ctrl-C, or a notebook's stop button, ends a run after its round, and at once if
it is used again. The run can be resumed.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs import resuming, single
from jobs.console import Audience
from jobs.display import Display
from jobs.shipped_experiments import experiment_file
from jobs.sweep import run_all
from rayfl.choices.plugins import is_in_memory
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.sweep import combine
from rayfl.experiment.table import read_table, with_overrides
from rayfl.limits.regular_files import path_of
from rayfl.report.results import RunResults, SweepResults
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.object_storage import is_url, require_path
from rayfl.run_directory.record import read_run
from rayfl.settings import shown
from rayfl.untyped import SettingsTable, Value

ExperimentInput = str | Path | Experiment | None
"""A file, the name of one that comes with rayfl, an experiment, or nothing but settings."""


@dataclass(frozen=True)
class RoundReport(RoundRow):
    """A round that has ended. A run that went back to its last checkpoint reports some rounds again, with equal values.

    round: from 0 on; planned: rounds of the whole run; metrics: the round's own values by name, such as
    "own/accuracy", a mean over clients; {} in a round without evaluation. Bits are summed over all clients;
    `simulated_s` is the duration of the round on the simulated clock, `wall_s` the real one.
    """

    planned: int
    metrics: Mapping[str, float]


class SweepFailed(RuntimeError):
    """Some runs of a sweep failed. errors: the sentence of each failed run, by title; directory: that of the sweep."""

    def __init__(self, message: str, errors: Mapping[str, str] | None = None, directory: Path = Path()) -> None:
        # Unpickling passes only the message, and sets the attributes afterwards.
        super().__init__(message)
        self.errors = errors or {}
        self.directory = directory


def run(
    experiment: ExperimentInput = None,
    *overrides: str,
    directory: str | Path | None = None,
    overwrite: bool = False,
    on_round: Callable[[RoundReport], object] | None = None,
    progress: bool = True,
    **settings: Value,
) -> RunResults:
    """Run an experiment and return its results. If the run was interrupted, the results are partial.

    directory: the run directory, or the URL of its copy, by default the next free one of the experiment's name in its
    `output.directory`; `overwrite` replaces the run in it. on_round: called with every round as it ends; if it returns
    True, the run ends after the current round, and if it raises, with that exception; it can be resumed. progress:
    show a bar in a terminal, and a line per round elsewhere.
    Errors: see the module; RayflError is raised before anything is written.
    """
    chosen = _experiment(experiment, overrides, settings)
    with _audience(chosen.rounds, on_round, progress) as audience:
        return RunResults(read_run(single.run(chosen, _place(directory), overwrite, audience)), chosen)


def resume(
    directory: str | Path,
    *overrides: str,
    on_round: Callable[[RoundReport], object] | None = None,
    progress: bool = True,
    **settings: Value,
) -> RunResults:
    """Resume the run in `directory`, or extend it to more `rounds`: the same bits as an uninterrupted run.

    Settings may change what does not change the numbers (runtime, output, checkpoint, report); otherwise as `run`.
    Raise RayflError for anything else, and if this machine computes other bits, unless `runtime.mixed` is set.
    """
    before, chosen = resuming.to_resume(_place(directory) or Path(), overrides, settings)
    with _audience(chosen.rounds, on_round, progress) as audience:
        return RunResults(read_run(single.go_on(before, chosen, audience)), chosen)


def sweep(
    experiment: ExperimentInput = None,
    *overrides: str,
    directory: str | Path | None = None,
    parallel: int = 1,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Value,
) -> SweepResults:
    """Run all combinations of a sweep. Return the results of all runs; after an interruption, of the runs that started.

    The setting `sweep` is the file's `[sweep]` table: `sweep={"seed": [1, 2], "method.lr": [0.01, 0.1]}`. If the file
    sweeps a key and you set that key directly, the key is no longer swept. Runs that already finished in `directory`
    are not run again. parallel: the number of concurrent runs, each in its own process. Raise SweepFailed, at the end,
    if a run failed; other errors and arguments are those of `run`.
    """
    table, lists = with_overrides(_table(experiment), overrides, settings)
    if lists is None:
        raise RayflError('nothing is swept: give sweep={"KEY": [VALUE, ...]}, or use rayfl.run')
    combinations = combine({"name": "experiment", **table}, lists, overrides)
    with Display(hidden=not progress) as display:
        swept = run_all(combinations, _path(directory), parallel, overwrite, Audience(display=display))
    if failed := swept.with_status("failed"):
        errors = {outcome.combination.title: outcome.error for outcome in failed}
        title, error = next(iter(errors.items()))
        raise SweepFailed(
            f"{len(failed)} of {len(swept.outcomes)} runs failed, the first with: {title}: {error}; what finished is "
            f"in {swept.directory}",
            errors,
            swept.directory,
        )
    # A run that was stopped as it began may have left nothing.
    begun = [outcome for outcome in swept.outcomes if (outcome.directory / "experiment.json").is_file()]
    return SweepResults(
        swept.directory, [RunResults(read_run(outcome.directory), outcome.combination.experiment) for outcome in begun]
    )


@contextmanager
def _audience(planned: int, on_round: Callable[[RoundReport], object] | None, progress: bool) -> Iterator[Audience]:
    if on_round is not None and not callable(on_round):
        raise RayflError(f"on_round={shown(on_round)} is not allowed; it must be a function of a Round")
    enough = threading.Event()

    def report_round(row: RoundRow, means: Mapping[str, float]) -> None:
        if on_round and on_round(RoundReport(**vars(row), planned=planned, metrics=dict(means))) is True:
            enough.set()

    with Display(hidden=not progress) as display:
        yield Audience(report_round, enough.is_set, display)


def _path(directory: str | Path | None) -> Path | None:
    """A directory of this machine. Raise RayflError for a URL, and for what is not a path."""
    path = path_of(directory, "directory")
    require_path(str(directory))
    return None if directory is None else path


def _place(directory: str | Path | None) -> Path | str | None:
    """A directory of this machine, or the URL of a run as text."""
    return directory if isinstance(directory, str) and is_url(directory) else _path(directory)


def _experiment(chosen: ExperimentInput, overrides: Sequence[str], settings: SettingsTable) -> Experiment:
    """The one experiment that the arguments describe. Raise RayflError if they describe a sweep, or none."""
    if isinstance(chosen, Experiment) and not overrides and not settings:
        return chosen
    table, lists = with_overrides(_table(chosen), overrides, settings)
    if lists is not None:
        raise RayflError("this experiment has swept settings (sweep), so it is several runs: give it to rayfl.sweep")
    return Experiment(**table)


def _table(given: ExperimentInput) -> dict[str, Value]:
    """All settings as a table."""
    if isinstance(given, str | Path):
        return read_table(experiment_file(path_of(given, "experiment")))
    if isinstance(given, Experiment):
        # A choice that no name can import stays the object.
        plain = given.as_dict()
        unnamed = {
            key for key, setting in plain.items() if isinstance(setting, dict) and is_in_memory(setting.get("name"))
        }
        return {key: getattr(given, key) if key in unnamed else value for key, value in plain.items()}
    if given is not None:
        raise RayflError(f"{shown(given)} is not an experiment: give the path of a file, an Experiment, or keywords")
    return {}
