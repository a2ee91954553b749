"""Reads JSON from untrusted files, with limits on size, nesting and the length of numbers."""

import json
from collections.abc import Mapping
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.limits.regular_files import read_bytes
from rayfl.settings import check_plain
from rayfl.untyped import Json

MOST_BYTES = 256 * 10**6
"""The most bytes of a file. The description of a run with a million clients' own settings is smaller."""


def read_json(path: Path) -> Mapping[str, Json]:
    """The table in a JSON file. If there is none, raise RayflError, whose text is the reason, or OSError."""
    table = parse(read_bytes(path, MOST_BYTES))
    if not isinstance(table, Mapping):
        raise RayflError("it holds no table")
    return table


def parse(text: bytes | str) -> Json:
    """The value of a JSON text. Raise RayflError, whose text is the reason, if it is invalid, or no setting
    could hold it (`settings.check_plain`)."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise RayflError("its tables are nested too deep") from None
    # Wrong JSON, no UTF-8, or a number of more digits than Python reads.
    except ValueError as error:
        raise RayflError(f"it is no JSON: {error}") from None
    check_plain(value)
    return value
