"""Checks an earlier run: does it belong to this experiment, can this machine resume it, and with which settings?"""

import json
import platform as system
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayfl import toml
from rayfl.data.loading import read_dataset
from rayfl.determinism import platform
from rayfl.errors import RayflError, log, refuse_if
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import described, determining_settings, require_copies
from rayfl.experiment.runtime import Runtime
from rayfl.experiment.table import located, read_table, split_override, with_overrides
from rayfl.run_directory import run_folder
from rayfl.run_directory.description import EXPERIMENT, TOML, is_run, read_experiment, read_origin
from rayfl.run_directory.object_storage import is_url, opened
from rayfl.run_directory.record import Run, read_run
from rayfl.run_directory.run_folder import RunFolder
from rayfl.settings import dotted, shown
from rayfl.tasks.supervised import with_task
from rayfl.untyped import SettingsTable

_MOST_SHOWN = 3
"""The number of changed settings that a sentence shows."""


def to_resume(
    location: Path | str, overrides: Sequence[str] = (), settings: SettingsTable | None = None
) -> tuple[Run, Experiment]:
    """Return the run to resume at `location`, and its experiment with the changes (`resumable`).

    If `location` is a URL, the run is downloaded first, and its copy stays there. Raise RayflError if the URL holds no
    run, if the directory to download to holds another run, or if the run's TOML file was edited.
    """
    folder = RunFolder.at(location, "")
    # Before a copy is fetched, which replaces the file.
    _require_unedited(folder.directory)
    if isinstance(location, str):
        fetch_newer(folder)
        if not is_run(folder.directory):
            raise RayflError(f"{location} holds no run ({EXPERIMENT} is missing there): name the folder of a run")
        overrides = [f"output.directory={json.dumps(folder.output)}", *overrides]
    before = read_run(folder.directory)
    return before, resumable(before, overrides, settings)


def _require_unedited(directory: Path) -> None:
    """Raise RayflError if the TOML file of a run was edited: a resumed run would ignore the edits."""
    path = directory / TOML
    if not (is_run(directory) and path.exists()):
        return
    written = tomllib.loads(toml.dumps(located(read_experiment(directory), directory)))
    try:
        edits = _in_words(_differences(dotted(written), dotted(read_table(path))))
    except RayflError as error:
        edits = str(error)
    if edits:
        raise RayflError(
            f"{path} was edited ({edits}), but a resumed run reads only {EXPERIMENT} beside it: give a change as "
            f"KEY=VALUE and remove {TOML}, which rayfl then writes again"
        )


def fetch_newer(folder: RunFolder) -> None:
    """Download a run from its storage, which it must have, if the copy there is ahead of the directory.

    Raise RayflError if the directory holds another run.
    """
    with opened(str(folder.url)) as storage:
        if run_folder.fetch_newer(storage, folder.directory, _require_same):
            log.info("%s is ahead of %s and was downloaded into it", folder.url, folder.directory)


def _require_same(here: Path, fetched: Path) -> None:
    """Raise RayflError if two directories hold runs of different settings or seeds."""
    if _changes(read_run(here).experiment, read_run(fetched).experiment).keys() - {"rounds"}:
        raise RayflError(f"{here} holds another run than its copy in the storage: move it away, or name another place")


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The old and new values, by dotted key, of changed settings that decide a run's numbers, and of the seed."""
    old, new = ({**determining_settings(experiment), "seed": experiment.get("seed")} for experiment in (before, after))
    return _differences(old, new)


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The old and new values of the keys whose values differ."""
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def _in_words(changes: Mapping[str, tuple[object, object]]) -> str:
    """The first changes, and the number of the others; "" if there are none."""
    words = [f"{key}={shown(old)} -> {shown(new)}" for key, (old, new) in changes.items()]
    more = len(words) - _MOST_SHOWN
    return ", ".join(words[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def earlier_run(
    directory: Path, experiment: Experiment, ways: str = "name another --dir, or give --overwrite"
) -> Run | None:
    """Return the experiment's run in `directory`, or None if there is no run.

    Raise RayflError if the run has other settings or is damaged; its message ends with `ways`, what the user can do.
    """
    if not is_run(directory):
        return None
    try:
        before = read_run(directory)
    except RayflError as error:
        raise RayflError(f"{error}; or {ways}") from None
    if changed := changed_settings(before, experiment):
        state = "a finished" if before.finished else "an unfinished"
        raise RayflError(f"{directory} holds {state} run with other settings ({changed}): {ways}")
    return before


def changed_settings(before: Run, experiment: Experiment) -> str:
    """The settings, seed, rounds and files in which a run differs from this experiment, in words; "" without any."""
    old, new = before.experiment, described(experiment).table
    if bool(old.get("task")) != bool(new.get("task")):
        # The digest without a name is that of the data.
        dataset = read_dataset(experiment.data)
        old, new = with_task(old, dataset), with_task(new, dataset)
    return _in_words(_changes(old, new))


def require_asked(before: Run, overrides: Sequence[str], settings: SettingsTable | None) -> None:
    """Raise RayflError if a run that began on another host would be copied to a storage, or would join a cluster, that
    only its own directory names."""
    if (host := read_origin(before.directory).get("host", "an unknown host")) == system.node():
        return
    asked = {".".join(split_override(override)[0]) for override in overrides} | {*(settings or {})}
    begun = {key: str(value) for key, value in dotted(before.experiment).items() if value not in (None, "", "local")}
    away = [key for key in begun if key == "runtime.address" or (key == "output.directory" and is_url(begun[key]))]
    if unasked := [key for key in away if not {key, key.partition(".")[0]} & asked]:
        key, value = unasked[0], begun[unasked[0]]
        raise RayflError(
            f"the run in {before.directory} began on another host ({host}), and has {key}={shown(value)}: give "
            f"{key}={value} to allow that here, or another {key}"
        )


def resumable(before: Run, overrides: Sequence[str], settings: SettingsTable | None = None) -> Experiment:
    """The experiment of a run, changed by `overrides`, and by `settings`, values by dotted key.

    Raise RayflError if a change would alter the rounds done so far, and as `require_asked`.
    """
    require_asked(before, overrides, settings)
    table, lists = with_overrides(located(before.experiment, before.directory), overrides, settings)
    if lists is not None:
        raise RayflError(f"sweep.{next(iter(lists), '')} is not a setting of a run; give it to: rayfl sweep")
    require_copies(before.experiment, table, before.directory)
    experiment = Experiment(**table)
    changes = _changes(before.experiment, described(experiment).table)
    if changed := _in_words({key: change for key, change in changes.items() if key != "rounds"}):
        raise RayflError(
            f"a resumed run keeps its settings ({changed}): start a new run to change them"
            + " (what [stop] has counted so far went by its old values)" * ("stop." in changed)
        )
    _require_more_rounds(before, experiment)
    return experiment


def _require_more_rounds(before: Run, experiment: Experiment) -> None:
    """Raise RayflError if there are fewer rounds than recorded, or if their new number would change recorded ones."""
    planned = before.experiment.get("rounds")
    if not isinstance(planned, int):
        raise RayflError(f"{before.directory / EXPERIMENT} has rounds={shown(planned)}: restore the file")
    method = experiment.method
    rounds = experiment.rounds
    num_done = len(before.rounds)
    can = method.kind.capabilities
    depends = can.depends_on_num_rounds or method.hyper.for_num_rounds(rounds) != method.hyper.for_num_rounds(planned)
    refuse_if(
        [
            (
                num_done and rounds != planned and depends,
                "rounds",
                f"={rounds} would change the rounds done so far, because method {method.name!r} depends on the number "
                f"of rounds, which was {planned}; start a new run",
            ),
            (
                rounds < num_done,
                "rounds",
                f"={rounds} is below the {num_done} rounds that {before.directory} already has",
            ),
        ]
    )


def require_same_platform(before: Run, runtime: Runtime, here: platform.Platform) -> None:
    """Raise RayflError if resuming here would change the results.

    `here`: the platform of this process, described after the experiment was prepared. On Ray this process only prepares
    the run, and the coordinator compares the actors.
    """
    unlike = platform.differences(platform.of_driver(before.platform), here, platform.ON_CPU)
    if runtime.executor == "inline":
        unlike = platform.differences(before.platform, here) or unlike
    if unlike and not runtime.mixed and (before.platform or len(before.rounds)):
        raise RayflError(
            f"the run was made with {platform.listed(unlike)}, so it would get other numbers here than without a stop; "
            "resume it where it began, or set runtime.mixed=true to continue anyway"
        )
