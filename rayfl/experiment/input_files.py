"""Files that an experiment names and a run needs: a trace, a graph, weights, a plugin's code.

They are read once, when a run is prepared, and copied into `files/` of its directory; a resumed run reads the copies. A
copy's name follows from its content (files/trace-0f3a5c1b2d4e.csv), so experiments with the same settings have the same
files. In an experiment's TOML file a path is relative to that file, elsewhere to the current directory. Files of
samples are not copied: a run records their paths, from the current directory if all lie in it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfl.choices import plugins
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded, read_bytes, reading
from rayfl.run_directory.description import Description, input_name

KINDS = {
    ("clients", "availability", "trace"): "trace",
    ("topology", "path"): "graph",
    ("model", "start"): "weights",
}
"""The settings that name a file, and the word with which the copy's name begins."""
STAYING = {("data", "path"), ("data", "test_path")}
"""The settings that name files of samples. They are too large to be copied; `data.digest` has their digests."""
_OPEN = (
    *("data", "partition", "model", "task", "method", "uplink", "downlink", "topology", "evaluation"),
    *("selection", "schedule", "wrap"),
)
"""The tables in which a name may refer to a plugin file: my_methods.py:FedExP."""


# Any: an experiment's table.
def kept_files(table: Mapping[str, Any]) -> Description:
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
        if key not in KINDS and not plugins.is_loaded(Path(name).stem.removeprefix("plugin-")):
            raise RayflError(f"{path} has changed since the experiment was read; start again")
        contents.update(copies)
        return name

    return Description(mapped(table, kept), contents)


def has_whole_digests(data: Mapping[str, Any]) -> bool:
    """Whether a table of data has the digests of files, and none of a sample only."""
    digests = data.get("digest")
    return isinstance(digests, Mapping) and bool(digests) and not any("sample-" in str(one) for one in digests.values())


def _are_inside(data: Mapping[str, Any]) -> bool:
    """Whether a run records its data by paths from the current folder: all of them lie in it, with whole digests."""
    paths = [expanded(data[name]).absolute() for _, name in STAYING if data.get(name)]
    inside = all(path.is_relative_to(Path.cwd()) and ".." not in path.parts for path in paths)
    return inside and has_whole_digests(data)


def _copies(key: tuple[str, ...], path: Path) -> dict[str, bytes]:
    """The content of a file by the path of its copy, followed by those of the files that a plug-in imports or reads.

    The copy keeps the ending, which tells the format of a graph. Raise OSError; SyntaxError or UnicodeDecodeError if a
    plug-in is not Python.
    """
    if key in KINDS:
        return {input_name(KINDS[key], plugins.digest(content := read_bytes(path)), path.suffix): content}
    file = plugins.PluginFile.read(path)
    return dict(file.copies(Path(input_name("plugin", file.digest, path.suffix))))


# Any: settings of any type.
def require_copies(began: Mapping[str, Any], table: Mapping[str, Any], directory: Path) -> None:
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
                if Path(copy).stem not in [Path(name).stem for name in names[key]]:
                    imported = "" if key in KINDS else " (its own, or that of files that it imports or reads)"
                    raise RayflError(
                        f"{'.'.join(key)} names a file with other content than {names[key][0]}{imported}, with which "
                        f"the run in {directory} began; give {'.'.join(key)}=FILE with a copy of that file"
                    )
        return path

    mapped(began, noted)
    mapped(table, checked)


# Any: a table of a TOML file, with a [sweep] or without.
def located(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table of a TOML file in `folder`, with its relative paths resolved from there.

    Those of data with digests, which a run has recorded, begin in a folder around it, or in the current one.
    """
    data = table.get("data")
    recorded = isinstance(data, Mapping) and has_whole_digests(data)

    def resolved(key: tuple[str, ...], path: str) -> str:
        homes = (folder, Path.cwd(), *folder.absolute().parents) if key in STAYING and recorded else (folder,)
        paths = [home / expanded(path) for home in homes]
        return str(next((one for one in paths if one.exists()), paths[0]))

    return mapped(table, resolved)


# Any: a table.
def absolute(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with absolute paths to files."""
    return mapped(table, lambda key, path: str(Path(path).absolute()))


# Any: a table, and what is in it.
def mapped(table: Mapping[str, Any], change: Callable[[tuple[str, ...], str], str]) -> dict[str, Any]:
    """The table with `change(key, path)` in place of every path to a file, also in a [sweep].

    In a name that refers to a class in a plugin file only the path is changed.
    """

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(inner, (*path, *str(key).split("."))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, path) for item in value]
        leads = ("sweep", "case"), ("sweep",), ("tune",)
        key = path[next((len(lead) for lead in leads if path[: len(lead)] == lead), 0) :]
        if key[:1] and key[0] in _OPEN and (named := plugins.file_of(value)) is not None:
            return f"{change(key, named[0])}:{named[1]}"
        return change(key, value) if key in (*KINDS, *STAYING) and isinstance(value, str) and value else value

    return walk(table, ())
