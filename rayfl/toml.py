"""Tables written as TOML, which tomllib reads."""

from collections.abc import Mapping
from typing import Any

import tomli_w

from rayfl.errors import RayflError


# Any: whatever TOML can hold.
def dumps(table: Mapping[str, Any]) -> str:
    """Return the text of a table. None is left out. Raise RayflError for values that TOML cannot hold."""
    try:
        return tomli_w.dumps(_without_none(table))
    except TypeError as error:
        raise RayflError(f"TOML cannot hold a value: {error}") from None


# Any: as above.
def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
