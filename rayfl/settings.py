"""Settings: the validated, frozen values that a user writes (an experiment, hyper-parameters, a compressor)."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class SettingsError(ValueError):
    """One sentence for the user: what was given, what is allowed, what to change."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown `name`: the closest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are: {', '.join(known) if known else 'none'}"


class Settings(BaseModel):
    """A frozen record that refuses unknown keys and wrong types with one sentence (`SettingsError`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # Any: the values are the user's, and pydantic is what gives them their types.
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(sentence(error, type(self))) from None


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong, as one sentence that names the key, the value and what is allowed."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path) or model.__name__
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}: {nearest(path[-1], _fields_at(model, path[:-1]))}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
        return f"{key}: {reason}" if path else reason
    return f"{key}={first['input']!r} is not allowed: {first['msg'][0].lower()}{first['msg'][1:]}"


def _fields_at(model: type[BaseModel], path: list[str]) -> Iterable[str]:
    """The known keys of the table that `path` leads to."""
    for part in path:
        field = model.model_fields.get(part)
        annotation = field.annotation if field is not None else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ()
        model = annotation
    return model.model_fields


def required(given: Mapping[str, object], key: str, where: str) -> object:
    """`given[key]`, or a sentence that says where it is missing."""
    if key not in given:
        raise SettingsError(f"{where}.{key} is missing")
    return given[key]
