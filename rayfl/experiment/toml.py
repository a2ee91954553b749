"""Tables written as TOML, what tomllib reads: scalars and lists first, then nested tables under their dotted names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rayfl.errors import RayflError


# Any: whatever TOML can hold.
def dumps(table: Mapping[str, Any]) -> str:
    """The text of a table. None is left out, since TOML has none; ValueError for values that TOML cannot hold."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _is_nested(value)]
    if path and (lines or not table):
        lines = ["", f"[{'.'.join(_key(part) for part in path)}]", *lines]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*path, key))
    return lines


def _is_nested(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{pairs}}}"
    raise RayflError(f"TOML cannot hold {value!r}, which is of type {type(value).__name__}")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    """A basic string. JSON escapes all that TOML wants escaped, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
