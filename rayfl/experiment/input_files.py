"""Files that an experiment names and a run cannot do without: a trace, a graph, weights, somebody's own code.

They are read once, as a run is prepared, and copied into `files/` of its directory, for the reader and for a resume:
what becomes of the originals changes nothing. A copy is called by what is in it (files/trace-0f3a5c1b2d4e.csv):
experiments with the same settings have the same files. In an experiment's TOML file a path is relative to that file,
elsewhere to the current directory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfl.choices import plugins
from rayfl.errors import RayflError, reason
from rayfl.limits.regular_files import expanded, read_bytes
from rayfl.run_directory.atomic_files import write_whole

KINDS = {
    ("clients", "availability", "trace"): "trace",
    ("topology", "path"): "graph",
    ("model", "start"): "weights",
}
"""The settings that name a file, and what such a file is."""
STAYING = {("data", "path"), ("data", "test_path")}
"""The settings that name files of samples, which are found as those of `KINDS` are and too large to be copied."""
FOLDER = "files"
_OPEN = ("data", "partition", "model", "method", "uplink", "downlink", "topology")
"""The tables in which a name may lead to a plugin file: my_methods.py:FedNova."""


def names_file(key: str, value: object) -> bool:
    """Whether the value of a dotted key is the path of a file, or leads to one."""
    return tuple(key.split(".")) in KINDS or (key.split(".")[0] in _OPEN and plugins.file_of(value) is not None)


@dataclass(frozen=True)
class KeptFiles:
    """An experiment's table in which files are called as their copies are, and what is in them by that name."""

    table: Mapping[str, Any]
    contents: Mapping[str, bytes]

    def write(self, directory: Path) -> None:
        """Put the copies into a run directory. OSError where the disk refuses."""
        for name, content in self.contents.items():
            place = directory / name
            place.parent.mkdir(exist_ok=True)
            if not place.is_file() or place.read_bytes() != content:
                write_whole(place, lambda partial, content=content: partial.write_bytes(content))


# Any: an experiment's table.
def kept_files(table: Mapping[str, Any]) -> KeptFiles:
    """Read the files that an experiment names. RayflError where one cannot be read."""
    contents: dict[str, bytes] = {}

    def kept(key: tuple[str, ...], path: str) -> str:
        if key in STAYING:
            return str(expanded(path).absolute())
        try:
            content = read_bytes(Path(path))
        except OSError as error:
            raise RayflError(
                f"{path} cannot be read ({reason(error)}); give {'.'.join(key)}=FILE with the file of the experiment"
            ) from None
        if key not in KINDS and not plugins.is_loaded(content):
            raise RayflError(f"{path} has changed since the experiment was read; begin again")
        # What a graph's file is, its ending says.
        name = f"{FOLDER}/{KINDS.get(key, 'plugin')}-{plugins.digest(content)}{Path(path).suffix}"
        contents[name] = content
        return name

    return KeptFiles(mapped(table, kept), contents)


# Any: a table of a TOML file, with a [sweep] or without.
def located(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table of a TOML file that lies in `folder`, with its paths to files taken from there."""
    return mapped(table, lambda key, path: str(folder / expanded(path)))


# Any: a table.
def absolute(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with paths to files that hold from anywhere."""
    return mapped(table, lambda key, path: str(Path(path).absolute()))


# Any: a table, and what is in it.
def mapped(table: Mapping[str, Any], change: Callable[[tuple[str, ...], str], str]) -> dict[str, Any]:
    """The table with `change(key, path)` in place of every path to a file, also of those in a [sweep].

    Of a name that leads to a class in a plugin file the path is changed, and the class stays.
    """

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(inner, (*path, *str(key).split("."))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, path) for item in value]
        key = path[1:] if path[:1] == ("sweep",) else path
        if key[:1] and key[0] in _OPEN and (leads := plugins.file_of(value)) is not None:
            return f"{change(key, leads[0])}:{leads[1]}"
        return change(key, value) if key in (*KINDS, *STAYING) and isinstance(value, str) and value else value

    return walk(table, ())
