"""An experiment as a table of settings: read from its TOML file and changed by overrides.

Nothing here loads torch, so that mistakes show at once.
"""

import datetime
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError
from rayfl.experiment.input_files import located
from rayfl.limits.regular_files import read_text, reading
from rayfl.settings import MOST_NESTED, check_plain, shown

LONGEST_NAME = 200
"""The most letters of a name: file names have at most 255, and some files are named after it."""
_MOST_DOTS = 1_000
MOST_BYTES = 1_000_000
"""Size of the largest TOML file that is read."""


def read_table(path: Path) -> dict[str, Any]:
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


# Any: a TOML table.
def _parsed(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text. Raise TOMLDecodeError for wrong TOML, RayflError for TOML that Python cannot read."""
    # tomllib takes time that grows with the square of a key's length.
    if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines() if "=" in line):
        raise RayflError(f"{place} has keys that are nested too deep; at most {MOST_NESTED} levels are allowed")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise RayflError(f"{place} has tables or lists nested too deep; at most {MOST_NESTED} are allowed") from None
    except ValueError:
        # Python refuses to read a decimal number of more than 4300 digits.
        raise RayflError(f"{place} has a whole number of more than 64 bits; give a smaller one") from None


# Any: tables of settings, and settings from Python.
def with_overrides(
    table: dict[str, Any], overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, list[Any]] | None]:
    """Put overrides, and settings by their dotted keys, into a table. Return the table without `[sweep]`, and the swept
    lists by dotted key; None if nothing is swept.

    An override of `sweep.KEY` changes the sweep; an override of a swept key takes that key out of it. Raise RayflError
    for a wrong override or `[sweep]` table.
    """
    settings = settings or {}
    of_sweep = [one for one in overrides if split_override(one)[0][0] == "sweep"]
    _override_all(table, [one for one in overrides if one not in of_sweep])
    for key, value in settings.items():
        put(table, key.split("."), copied(value), key)
    if "sweep" not in table and not of_sweep:
        return table, None
    # Lists in the call's own `sweep` stay, even if the call also sets a swept key.
    overridden = {".".join(split_override(one)[0]) for one in overrides}
    if "sweep" not in settings:
        overridden |= settings.keys()
    lists = _swept_lists(table.pop("sweep", {}))
    lists = {key: values for key, values in lists.items() if key not in overridden}
    for one in of_sweep:
        # Each by itself, because one swept key may lie inside another: method and method.lr.
        alone: dict[str, Any] = {}
        override(alone, one)
        lists |= _swept_lists(alone["sweep"])
    return table, lists


# Any: a TOML table.
def _override_all(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put overrides into a table, in their order. Raise RayflError as `override` does, and if one replaces the whole
    table around an earlier one, which would be dropped."""
    for one, later in itertools.combinations(overrides, 2):
        inner, outer = split_override(one)[0], split_override(later)[0]
        if len(outer) < len(inner) and inner[: len(outer)] == outer:
            raise RayflError(
                f"{later} replaces the whole table {'.'.join(outer)!r}, so that {one} before it is dropped; give "
                f"{later} first"
            )
    for one in overrides:
        override(table, one)


# Any: tables and values of a file.
def _swept_lists(value: Any, path: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Return the lists of a `[sweep]` table by their dotted keys, whether nested or not.

    Raise RayflError if a value is not a list, or is empty.
    """
    key = ".".join(("sweep", *path))
    if isinstance(value, Mapping):
        return {name: found for part in value for name, found in _swept_lists(value[part], (*path, part)).items()}
    if not path or not isinstance(value, list) or not value:
        wanted = "a list of at least one value" if path else 'a table of lists, such as {"seed" = [0, 1, 2]}'
        raise RayflError(f"{key}={shown(value)} is not allowed; it must be {wanted}")
    return {".".join(path): value}


# Any: a TOML table.
def override(table: dict[str, Any], text: str) -> None:
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
    if not sign or not all(path):
        raise RayflError(f"{shown(text)} is not an override; write key=value, for example method.lr=0.1")
    if len(path) > MOST_NESTED:
        raise RayflError(f"{shown(text)} is nested deeper than {MOST_NESTED} tables; use fewer")
    return path, value


# Any: a table, or a value of one.
def copied(value: Any) -> Any:
    """A copy of nested tables and lists; the values in them, such as objects from Python, are not copied."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


# Any: a TOML table, and a value of it.
def put(table: dict[str, Any], path: Sequence[str], value: Any, said: str) -> None:
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


# Any: a TOML value.
def _value(text: str) -> Any:
    """The TOML value of a text; the text itself if it is no TOML or a date."""
    try:
        parsed = _parsed(f"value = {text}", shown(text))
    except tomllib.TOMLDecodeError:
        return text
    is_date = isinstance(parsed["value"], datetime.date | datetime.time)
    return text if is_date or len(parsed) > 1 else parsed["value"]
