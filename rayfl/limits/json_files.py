"""JSON from a file that may be a stranger's: bounded in size, in nesting and in the length of its numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError
from rayfl.limits.regular_files import read_bytes

MOST_BYTES = 256 * 10**6
"""Of a file. What describes a run of a million clients with settings of their own is below it."""
MOST_NESTED = 64
"""Tables and lists inside each other. What rayfl writes has about ten."""


def read_json(path: Path) -> Mapping[str, Any]:
    """The table in a JSON file. ValueError, whose text is the reason, or OSError where there is none."""
    found = parse(read_bytes(path, MOST_BYTES))
    if not isinstance(found, Mapping):
        raise RayflError("it holds no table")
    return found


# Any: JSON.
def parse(text: bytes | str) -> Any:
    """The value of a JSON text. ValueError, whose text is the reason, where it is none or nested too deep."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RayflError(f"its line {error.lineno} is no JSON") from None
    except UnicodeDecodeError:
        raise RayflError("it is no UTF-8 text") from None
    except RecursionError:
        raise RayflError("its tables are nested too deep") from None
    except ValueError:
        raise RayflError("it holds a number that is too long") from None
    require_shallow(value)
    return value


# Any: JSON or TOML.
def require_shallow(value: Any) -> None:
    """ValueError if lists and tables are nested more than `MOST_NESTED` deep."""
    level = [value] if isinstance(value, Mapping | list) else []
    for _ in range(MOST_NESTED):
        if not level:
            return
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, Mapping) else outer))
        level = [one for one in inner if isinstance(one, Mapping | list)]
    if level:
        raise RayflError("its tables are nested too deep")
