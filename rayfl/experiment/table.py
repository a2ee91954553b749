"""An experiment as a table of settings: read from its TOML file and changed by overrides; and the paths in a table.

In an experiment's TOML file a path is relative to that file, elsewhere to the current directory. Nothing here loads
torch, so that mistakes show at once.
"""

import datetime
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rayfl.choices import plugins
from rayfl.errors import RayflError, refuse_if
from rayfl.limits.regular_files import expanded, read_text, reading
from rayfl.settings import MOST_NESTED, check_plain, shown
from rayfl.untyped import SettingsTable, Value

KINDS = {
    ("clients", "availability", "trace"): "trace",
    ("topology", "path"): "graph",
    ("partition", "path"): "partition",
    ("topology", "base", "path"): "graph",
    ("model", "start"): "weights",
}
"""The settings that name a file, and the word with which the copy's name begins."""
STAYING = {("data", "path"), ("data", "test_path"), ("data", "image_folder")}
"""The settings that name files of examples. They are too large to be copied; `data.digest` has their digests."""
_OPEN = (
    *("data", "partition", "model", "task", "method", "uplink", "downlink", "topology", "evaluation"),
    *("selection", "schedule", "wrap"),
)
"""The tables in which a name may refer to a plugin file: my_methods.py:FullLength."""
LONGEST_NAME = 200
"""The most letters of a name: file names have at most 255, and some files are named after it."""
_MOST_DOTS = 1_000
MOST_BYTES = 1_000_000
"""Size of the largest TOML file that is read."""


def read_table(path: Path) -> dict[str, Value]:
    """Read a TOML file as a table. Relative paths in it start at the folder of the TOML file.

    Raise RayflError if it cannot be read.
    """
    with reading(path, "give the path of an experiment's valid TOML file"):
        table = _parsed(read_text(path, MOST_BYTES), str(path))
    check_plain(table)
    table = located(table, path.parent)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    table.setdefault("name", stem[:LONGEST_NAME] or "experiment")
    return table


def _parsed(text: str, source: str) -> dict[str, Value]:
    """The table of a TOML text. Raise TOMLDecodeError for wrong TOML, RayflError for TOML that Python cannot read."""
    # tomllib takes time that grows with the square of a key's length.
    if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines() if "=" in line):
        raise RayflError(f"{source} has keys that are nested too deep; at most {MOST_NESTED} levels are allowed")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise RayflError(f"{source} has tables or lists nested too deep; at most {MOST_NESTED} are allowed") from None
    except ValueError:
        # Python refuses to read a decimal number of more than 4300 digits.
        raise RayflError(f"{source} has a whole number of more than 64 bits; give a smaller one") from None


def with_overrides(
    table: dict[str, Value], overrides: Sequence[str] = (), settings: SettingsTable | None = None
) -> tuple[dict[str, Value], dict[str, list[Value]] | None]:
    """Put overrides, and settings by their dotted keys, into a table. Return the table without `[sweep]`, and the swept
    lists by dotted key; None if nothing is swept.

    An override of `sweep.KEY` changes the sweep; an override of a swept key takes that key out of it. Raise RayflError
    for a wrong override or `[sweep]` table.
    """
    settings = settings or {}
    of_sweep = [text for text in overrides if split_override(text)[0][0] == "sweep"]
    _override_all(table, [text for text in overrides if text not in of_sweep])
    for key, value in settings.items():
        put(table, key.split("."), copied(value), key)
    if "sweep" not in table and not of_sweep:
        return table, None
    # Lists in the call's own `sweep` stay, even if the call also sets a swept key.
    overridden = {".".join(split_override(text)[0]) for text in overrides}
    if "sweep" not in settings:
        overridden |= settings.keys()
    lists = {key: values for key, values in _swept_lists(table.pop("sweep", {})).items() if key not in overridden}
    for text in of_sweep:
        # Each by itself, because one swept key may lie inside another: method and method.lr.
        alone: dict[str, Value] = {}
        override(alone, text)
        lists |= _swept_lists(alone["sweep"])
    return table, lists


def _override_all(table: dict[str, Value], overrides: Sequence[str]) -> None:
    """Put overrides into a table, in their order. Raise RayflError as `override` does, and if one replaces the whole
    table around an earlier one, which would be dropped."""
    for earlier, later in itertools.combinations(overrides, 2):
        inner, outer = split_override(earlier)[0], split_override(later)[0]
        if len(outer) < len(inner) and inner[: len(outer)] == outer:
            raise RayflError(
                f"{later} replaces the whole table {'.'.join(outer)!r}, so that {earlier} before it is dropped; give "
                f"{later} first"
            )
    for text in overrides:
        override(table, text)


def _swept_lists(value: Value, path: tuple[str, ...] = ()) -> dict[str, list[Value]]:
    """Return the lists of a `[sweep]` table by their dotted keys, whether nested or not.

    Raise RayflError if a value is not a list, or is empty.
    """
    key = ".".join(("sweep", *path))
    if isinstance(value, Mapping):
        return {name: values for part in value for name, values in _swept_lists(value[part], (*path, part)).items()}
    if not path or not isinstance(value, list) or not value:
        wanted = "a list of at least one value" if path else 'a table of lists, such as {"seed" = [0, 1, 2]}'
        raise RayflError(f"{key}={shown(value)} is not allowed; it must be {wanted}")
    return {".".join(path): value}


def override(table: dict[str, Value], text: str) -> None:
    """Put one `key=value` into a table. Relative paths in it start at the current directory.

    Raise RayflError if it is not an override, or its key leads through a plain value.
    """
    path, written = split_override(text)
    value = _value(written)
    check_plain(value, tuple(path))
    put(table, path, value, text)


def split_override(text: str) -> tuple[list[str], str]:
    """["method", "lr"] and "0.1" of "method.lr=0.1". Raise RayflError if it is not an override."""
    if not isinstance(text, str):
        raise RayflError(f"{shown(text)} is not an override; write a text as 'method.lr=0.1'")
    key, sign, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    refuse_if(
        [
            (
                not sign or not all(path),
                "",
                f"{shown(text)} is not an override; write key=value, for example method.lr=0.1",
            ),
            (len(path) > MOST_NESTED, "", f"{shown(text)} is nested deeper than {MOST_NESTED} tables; use fewer"),
        ]
    )
    return path, value


def copied(value: Value) -> Value:
    """A copy of nested tables and lists; the values in them, such as objects from Python, are not copied."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def put(table: dict[str, Value], path: Sequence[str], value: Value, said: str) -> None:
    """Set a value inside nested tables. Missing tables are made, and a bare name or class on the way becomes a table.

    Raise RayflError, which quotes `said`, if the path leads through anything else.
    """
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str) or callable(inner):
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise RayflError(f"{said!r} cannot be set: {part} is {shown(inner)}, which has no keys")
        table = inner
    table[path[-1]] = value


def _value(text: str) -> Value:
    """The TOML value of a text; the text itself if it is no TOML or a date."""
    with suppress(tomllib.TOMLDecodeError):
        value, *others = _parsed(f"value = {text}", shown(text)).values()
        if not others and not isinstance(value, datetime.date | datetime.time):
            return value
    return text


def located(table: SettingsTable, folder: Path) -> dict[str, Value]:
    """The table of a TOML file in `folder`, with its relative paths resolved from there.

    Those of data with digests, which a run has recorded, begin in a folder around it, or in the current one.
    """
    data = table.get("data")
    recorded = isinstance(data, Mapping) and has_whole_digests(data)

    def resolved(key: tuple[str, ...], path: str) -> str:
        homes = (folder, Path.cwd(), *folder.absolute().parents) if key in STAYING and recorded else (folder,)
        paths = [home / expanded(path) for home in homes]
        return str(next((candidate for candidate in paths if candidate.exists()), paths[0]))

    return mapped(table, resolved)


def absolute(table: SettingsTable) -> dict[str, Value]:
    """The table with absolute paths to files."""
    return mapped(table, lambda key, path: str(Path(path).absolute()))


def mapped(table: SettingsTable, change: Callable[[tuple[str, ...], str], str]) -> dict[str, Value]:
    """The table with `change(key, path)` in place of every path to a file, also in a [sweep].

    In a name that refers to a class in a plugin file only the path is changed.
    """

    def walk(value: Value, path: tuple[str, ...]) -> Value:
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


def has_whole_digests(data: SettingsTable) -> bool:
    """Whether a table of data has the digests of files, and none of an example only."""
    digests = data.get("digest")
    return (
        isinstance(digests, Mapping)
        and bool(digests)
        and not any("sample-" in str(digest) for digest in digests.values())
    )
