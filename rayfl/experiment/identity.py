"""What makes runs the same: the settings that decide their numbers, and the files that they name.

A trace, a graph, weights and a plug-in's code are read once, when a run is prepared, and copied into `files/` of its
directory; a resumed run reads the copies. A copy's name follows from its content (files/trace-0f3a5c1b2d4e.csv); code
keeps its name in a folder with such a name (files/plugin-0f3a5c1b2d4e/my_methods.py), which decides nothing. So
experiments with the same settings have the same files. Files of examples are not copied: a run records their paths,
from the current directory if all lie in it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rayfl.choices import plugins
from rayfl.data.file_digest import source_digests
from rayfl.data.partitions.index_folder import folder_content
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.table import KINDS, STAYING, has_whole_digests, mapped
from rayfl.limits.regular_files import expanded, read_bytes, reading
from rayfl.run_directory.description import Description, input_name
from rayfl.settings import dotted
from rayfl.untyped import SettingsTable

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
    "server_on_device",
    "graphs",
)
"""Settings of `[runtime]` that change the time only. If `mixed` changed bits, platform.json has the machines."""


_COPY = re.compile(r"(?<=files/)(plugin-[0-9a-f]{12})/[^/]*\.py$")
"""The path of a plug-in's copy."""
_DATA_PATHS = ("path", "test_path", "root", "image_folder", "cache")
"""The settings of `[data]` that name files and folders."""


def determining_settings(experiment: Mapping[str, object]) -> dict[str, object]:
    """The settings that decide a run's numbers, without its seed, by dotted keys.

    Where the data have whole digests their folder decides nothing: only which of its files has which part.
    """
    parts = _parts(data) if isinstance(data := experiment.get("data"), Mapping) and has_whole_digests(data) else {}
    table = mapped({name: value for name, value in experiment.items() if name not in NOT_DETERMINING}, _by_content)
    settings = dotted(table) | parts
    # The first condition saves time where hundreds of runs are compared.
    return {
        key: value
        for key, value in settings.items()
        if not (key.startswith("runtime.") and any(lies_in(key, f"runtime.{setting}") for setting in _ONLY_TIME))
    }


def _by_content(key: tuple[str, ...], path: str) -> str:
    """The path of a copy without the name of its original, which decides nothing: files/plugin-0f3a5c1b2d4e.py."""
    return _COPY.sub(r"\1.py", path)


def _parts(data: SettingsTable) -> dict[str, str]:
    """The place of each data file below the folder of all, and "." for each folder that holds files, by dotted keys."""
    paths = {f"data.{key}": os.path.join("/", data[key]) for key in _DATA_PATHS if isinstance(data.get(key), str)}
    files = [path for path in paths.values() if any(path.endswith(f"/{name}") for name in data["digest"])]
    home = os.path.commonpath([os.path.dirname(path) for path in files]) if files else ""
    return {key: os.path.relpath(path, home) if path in files else "." for key, path in paths.items()}


def described(experiment: "Experiment") -> Description:
    """The description of an experiment: reads the files that it names, and digests those of its examples.

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
    method = experiment.method
    rounds = experiment.rounds
    settings = {key: value for key, value in determining_settings(table).items() if key != "rounds"}
    counted = rounds if method.kind.capabilities.depends_on_num_rounds else None
    decisive = [settings, table.get("seed"), [repr(counted), repr(method.hyper.for_num_rounds(rounds))]]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def swept_items(experiment: Mapping[str, object]) -> Mapping[str, str]:
    """The items of a sweep that make a run, by swept key; empty if it is of no sweep."""
    items = experiment.get("swept")
    return {str(key): str(item) for key, item in items.items()} if isinstance(items, Mapping) else {}


def require_settings(experiments: Iterable[Mapping[str, object]], names: Sequence[str]) -> None:
    """Raise RayflError unless each of `names` is a setting, a table of settings or a swept key of an experiment."""
    known = {
        key
        for experiment in experiments
        for key in ("label", *determining_settings(experiment), *swept_items(experiment))
    }
    for name in names:
        if not any(lies_in(setting, name) for setting in known):
            averaged = "a cell of a table is the mean over seeds; results.frame has each run's numbers"
            raise RayflError(
                f"no run has the setting {name!r}; {averaged if name == 'seed' else did_you_mean(name, known)}"
            )


def lies_in(setting: str, name: str) -> bool:
    """Whether the dotted key `setting` is `name` or lies in the table `name`."""
    return setting == name or setting.startswith(f"{name}.")


def kept_files(table: SettingsTable) -> Description:
    """The description of an experiment, with the files that it names. Raise RayflError if one cannot be read."""
    contents: dict[str, bytes] = {}
    relative = _are_inside(table.get("data", {}))

    def kept(key: tuple[str, ...], path: str) -> str:
        if key in STAYING:
            stays = expanded(path).absolute()
            return str(stays.relative_to(Path.cwd()) if relative else stays)
        with reading(Path(path), f"give {'.'.join(key)}=FILE with the file of the experiment", SyntaxError):
            copies = _copies(key, Path(path))
        name = next(iter(copies))
        loaded = {f"plugin-{file.digest}" for file in plugins.loaded_files()}
        if key not in KINDS and Path(name).parent.name not in loaded:
            raise RayflError(f"{path} has changed since the experiment was read; start again")
        contents.update(copies)
        return name

    return Description(mapped(table, kept), contents)


def _are_inside(data: SettingsTable) -> bool:
    """Whether a run records its data by paths from the current folder: all of them lie in it, with whole digests."""
    paths = [expanded(data[name]).absolute() for _, name in STAYING if data.get(name)]
    return all(path.is_relative_to(Path.cwd()) and ".." not in path.parts for path in paths) and has_whole_digests(data)


def _copies(key: tuple[str, ...], path: Path) -> dict[str, bytes]:
    """The content of a file by the path of its copy, followed by those of the files that a plug-in imports or reads.

    The copy keeps the ending, which tells the format of a graph. Raise OSError; SyntaxError or UnicodeDecodeError if a
    plug-in is not Python.
    """
    if key in KINDS:
        content = folder_content(path) if path.is_dir() else read_bytes(path)
        return {input_name(KINDS[key], plugins.digest(content), ".json" if path.is_dir() else path.suffix): content}
    file = plugins.PluginFile.read(path)
    return dict(file.copies(Path(input_name("plugin", file.digest, ""), path.name)))


def require_copies(began: SettingsTable, table: SettingsTable, directory: Path) -> None:
    """RayflError if a file that `table` names is not the one with which the run in `directory` began, by the digest in
    the name of its copy.

    began: the experiment of the run as its directory has it. A table that was made of it is checked before any code in
    these files runs. A file that cannot be read, or of which `began` has none, is left to those who need it.
    """
    names: dict[tuple[str, ...], list[str]] = {}

    def noted(key: tuple[str, ...], path: str) -> str:
        names.setdefault(key, []).append(path)
        return path

    def checked(key: tuple[str, ...], path: str) -> str:
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            if key in names and key not in STAYING:
                copy = next(iter(_copies(key, Path(path))))
                if Path(_by_content(key, copy)).stem not in [Path(_by_content(key, name)).stem for name in names[key]]:
                    imported = "" if key in KINDS else " (its own, or that of files that it imports or reads)"
                    raise RayflError(
                        f"{'.'.join(key)} names a file with other content than {names[key][0]}{imported}, with which "
                        f"the run in {directory} began; give {'.'.join(key)}=FILE with a copy of that file"
                    )
        return path

    mapped(began, noted)
    mapped(table, checked)
