"""The settings that decide the numbers of a run, and so which runs belong to one experiment."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayfl.data.file_digest import source_digests
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.input_files import has_whole_digests, kept_files
from rayfl.run_directory.description import Description
from rayfl.settings import dotted

if TYPE_CHECKING:
    from rayfl.experiment.experiment import Experiment

NOT_DETERMINING = ("seed", "name", "label", "swept", "checkpoint", "output", "report")
"""Tables and settings of the run's name, place and evaluation, which do not change its numbers."""


_ONLY_TIME = (
    "executor",
    "actors",
    "num_cpus",
    "num_gpus",
    "labels",
    "mixed",
    "address",
    "object_store_memory_mb",
    "start_timeout_s",
    "wait_for_room_s",
    "call_timeout_s",
    "limit_s",
)
"""Settings of `[runtime]` that change the time only. If `mixed` changed bits, platform.json has the machines."""


_DATA_PATHS = ("path", "test_path", "root", "cache")
"""The settings of `[data]` that name files and folders."""


def determining_settings(experiment: Mapping[str, object]) -> dict[str, object]:
    """The settings that decide a run's numbers, without its seed, by dotted keys.

    Where the data have whole digests their folder decides nothing: only which of its files has which part.
    """
    kept = {key: value for key, value in experiment.items() if key not in NOT_DETERMINING}
    settings, only_time = dotted(kept), [f"runtime.{key}" for key in _ONLY_TIME]
    # The first condition saves time where hundreds of runs are compared.
    left_out = {key for key in settings if key.startswith("runtime.") and any(lies_in(key, one) for one in only_time)}
    parts = _parts(data) if isinstance(data := experiment.get("data"), Mapping) and has_whole_digests(data) else {}
    return {key: value for key, value in (settings | parts).items() if key not in left_out}


# Any: a table of settings.
def _parts(data: Mapping[str, Any]) -> dict[str, str]:
    """The place of each data file below the folder of all, and "." for each folder that holds files, by dotted keys."""
    paths = {f"data.{key}": os.path.join("/", data[key]) for key in _DATA_PATHS if isinstance(data.get(key), str)}
    files = [path for path in paths.values() if any(path.endswith(f"/{name}") for name in data["digest"])]
    home = os.path.commonpath([os.path.dirname(path) for path in files]) if files else ""
    return {key: os.path.relpath(path, home) if path in files else "." for key, path in paths.items()}


def described(experiment: "Experiment") -> Description:
    """The description of an experiment: reads the files that it names, and digests those of its samples.

    Raise RayflError as of both.
    """
    table = experiment.as_dict()
    if digests := source_digests(experiment.data):
        table["data"]["digest"] = digests
    return kept_files(table)


def identity(experiment: "Experiment", table: Mapping[str, object]) -> str:
    """SHA-256 of everything that decides the numbers of a run's rounds, its seed included.

    `table`: the experiment's settings, with the paths of the copies in place of those of its files. The number of
    rounds counts only if it changes rounds already played.
    """
    method, rounds = experiment.method, experiment.rounds
    settings = {key: value for key, value in determining_settings(table).items() if key != "rounds"}
    follows_rounds = rounds if method.kind.depends_on_num_rounds else None, method.hyper.for_num_rounds(rounds)
    decisive = [settings, table.get("seed"), [repr(one) for one in follows_rounds]]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def swept_items(experiment: Mapping[str, object]) -> Mapping[str, str]:
    """The items of a sweep that make a run, by swept key; empty if it is of no sweep."""
    found = experiment.get("swept")
    return {str(key): str(item) for key, item in found.items()} if isinstance(found, Mapping) else {}


def require_settings(experiments: Iterable[Mapping[str, object]], names: Sequence[str]) -> None:
    """Raise RayflError unless each of `names` is a setting, a table of settings or a swept key of an experiment."""
    known = {key for one in experiments for key in ("label", *determining_settings(one), *swept_items(one))}
    for name in names:
        if not any(lies_in(setting, name) for setting in known):
            raise RayflError(f"no run has the setting {name!r}; {did_you_mean(name, known)}")


def lies_in(setting: str, name: str) -> bool:
    """Whether the dotted key `setting` is `name` or lies in the table `name`."""
    return setting == name or setting.startswith(f"{name}.")
