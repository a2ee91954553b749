"""An experiment's TOML file, with overrides, as a table. Nothing here loads torch, so that mistakes show at once."""

import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError, nearest, reason
from rayfl.experiment.input_files import located
from rayfl.limits.regular_files import read_text
from rayfl.settings import MOST_NESTED, check_plain, shown

LONGEST_NAME = 200
"""The most letters of a name: file names have at most 255, and some files are named after it."""
_MOST_DOTS = 1_000
MOST_BYTES = 1_000_000
"""Size of the largest TOML file that is read."""


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file as a table with the overrides.

    Raise RayflError if it cannot be read. Paths of files in it are relative to the TOML file, paths in overrides to the
    current directory.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise RayflError(f"there is no file {path}; {_others(path)}") from None
    except UnicodeDecodeError:
        raise RayflError(f"{path} is not UTF-8 text; give the path of an experiment's TOML file") from None
    except OSError as error:
        raise RayflError(
            f"{path} cannot be read ({reason(error)}); give the path of an experiment's TOML file"
        ) from None
    try:
        table = _parsed(text, str(path))
    except tomllib.TOMLDecodeError as error:
        raise RayflError(f"{path} is not valid TOML: {error}") from None
    check_plain(table)
    table = located(table, path.parent)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    table.setdefault("name", stem[:LONGEST_NAME] or "experiment")
    override_all(table, overrides)
    return table


# Any: a TOML table.
def _parsed(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text. tomllib.TOMLDecodeError for wrong TOML, RayflError for TOML that Python cannot read."""
    # tomllib takes time that grows with the square of a key's length.
    if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines() if "=" in line):
        raise RayflError(f"{place} has keys nested too deep; at most {MOST_NESTED} tables may be in each other")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise RayflError(f"{place} has tables or lists nested too deep; at most {MOST_NESTED} may be") from None
    except ValueError:
        # Python refuses to read a decimal number of more than 4300 digits.
        raise RayflError(f"{place} has a whole number of more than 64 bits; give a smaller one") from None


def _others(path: Path) -> str:
    found = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    known = [str(other) for other in found if other.name != "pyproject.toml"]
    return nearest(str(path), known) if known else "give the path of an experiment's TOML file"


# Any: a TOML table.
def override_all(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put overrides into a table, in their order. RayflError as of `override`, and for an override that a later one
    would drop because it replaces the whole table around it."""
    paths = [split_override(one)[0] for one in overrides]
    for place, one in enumerate(overrides):
        for later, path in zip(overrides[place + 1 :], paths[place + 1 :], strict=True):
            if len(path) < len(paths[place]) and paths[place][: len(path)] == path:
                raise RayflError(
                    f"{later} replaces the whole table {'.'.join(path)!r}, so that {one} before it is dropped; give "
                    f"{later} first"
                )
        override(table, one)


# Any: a TOML table.
def override(table: dict[str, Any], text: str) -> None:
    """Put one `key=value` into a table.

    Raise RayflError if it is no override, or its key leads through a plain value.
    """
    path, said = split_override(text)
    value = _value(said)
    check_plain(value, tuple(path))
    put(table, path, value, text)


def split_override(text: str) -> tuple[list[str], str]:
    """["method", "lr"] and "0.1" of "method.lr=0.1". Raise RayflError if it is no override."""
    key, sign, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not sign or not all(path):
        raise RayflError(f"{shown(text)} is not an override; write key=value, for example method.lr=0.1")
    if len(path) > MOST_NESTED:
        raise RayflError(f"{shown(text)} is nested deeper than {MOST_NESTED} tables; use fewer")
    return path, value


def is_of_sweep(text: str) -> bool:
    """Whether an override is one of the `[sweep]` table."""
    return split_override(text)[0][0] == "sweep"


# Any: a TOML table, and settings from Python.
def put_all(table: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Put settings into a table, by their dotted keys. Raise RayflError if a key leads through a plain value."""
    for key, value in settings.items():
        put(table, key.split("."), copied(value), key)


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
            raise RayflError(f"{said!r} is not an override: {part} is {shown(inner)}, which has no keys")
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
