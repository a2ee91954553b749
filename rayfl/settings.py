"""Settings: the validated, frozen values that a user writes (an experiment, hyper-parameters, a compressor).

Also which settings other people's code has read in this process, so that a run can refuse one that nothing reads. Our
own classes are not watched: the contract tests prove that they read all their settings, or declare them in
`Settings.unused`.
"""

import difflib
import functools
import sys
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rayfl.errors import RayflError, UnknownKey, UnusedSetting, one_line, plugin_line
from rayfl.untyped import Foreign, SettingsTable, Value

KINDS = {
    bool: ("true or false", "values true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
}
"""Types in a user's words: one value, several values."""


MOST_NESTED = 32
"""The most levels of tables and lists in a setting."""


def dotted(table: SettingsTable, prefix: str = "", dot: str = ".") -> dict[str, Value]:
    """The settings in nested tables by their dotted keys: {"method": {"lr": 0.1}} is {"method.lr": 0.1}."""
    flat: dict[str, Value] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= dotted(value, f"{key}{dot}", dot) if isinstance(value, Mapping) else {key: value}
    return flat


def unused_with(**others: Value) -> dict[str, Value]:
    """For a field's `json_schema_extra`: the values of another setting beside which this one does nothing.

    `beta2: float = Field(default=0.99, json_schema_extra=unused_with(server_optimizer=["adagrad"]))`
    """
    return {"unused_with": others}


class Settings(BaseModel):
    """A frozen record that refuses unknown keys and wrong types with one sentence (`RayflError`).

    Types are strict: "5" and true are not numbers, and 5.0 is not a whole number. NaN and infinity are refused too.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Foreign) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        watch(cls)

    def __init__(self, **values: Value) -> None:
        check_plain(values)
        try:
            super().__init__(
                **{key: _fitting(value, type(self).model_fields.get(key)) for key, value in values.items()}
            )
        except ValidationError as error:
            raise explained_mistake(error, type(self), values) from None
        # pydantic takes ValueErrors of validators alone; a plug-in's may raise anything.
        except BaseException as error:
            if isinstance(error, RayflError | KeyboardInterrupt) or not (line := plugin_line(error)):
                raise
            raise RayflError(one_line(f"{type(error).__name__}: {error}{line}; raise a ValueError instead")) from error

    def unused(self) -> Mapping[str, str]:
        """The settings that do nothing beside the others, by name, each with the reason ("as ...", "without ...").

        By default those that their fields declare by `unused_with`. A setting in a table has a dotted name.
        """
        return {
            name: f"beside {other}={shown(value)}"
            for name, field in type(self).model_fields.items()
            if isinstance(extra := field.json_schema_extra, dict)
            for other, values in cast(dict[str, Value], extra.get("unused_with", {})).items()
            if (value := getattr(self, other)) in values
        }

    @model_validator(mode="after")
    def _nothing_is_unused(self) -> Self:
        for key, why in self.unused().items():
            *tables, name = key.split(".")
            table = functools.reduce(getattr, tables, self)
            if table.is_given(name):
                raise UnusedSetting(f"={shown(getattr(table, name))} does nothing {why}; remove it", (*tables, name))
        return self

    def settle(self, **values: Value) -> None:
        """Give fields values that follow from the others; only a validator may, before anybody has read them.

        The settings are then complete wherever they are shown, compared or saved.
        """
        vars(self).update(values)

    def is_given(self, name: str) -> bool:
        """Whether a setting differs from its default. A default value that is written out is harmless."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        # As texts: a comparison of arrays has no one answer.
        return repr(getattr(self, name)) != repr(default)


def check_plain(value: Value, key: tuple[str, ...] = ()) -> None:
    """Raise RayflError for a value that no setting takes: a whole number beyond 64 bits, a null character, deep
    nesting.

    Python can hold them; numpy, torch and files cannot.
    """
    if isinstance(value, Mapping | list | tuple) and len(key) == MOST_NESTED:
        path = ".".join(_named(key)[:3])
        raise RayflError(f"{path}... is nested deeper than {MOST_NESTED} tables and lists; use fewer")
    match value:
        case Mapping():
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise RayflError(f" has the key {shown(name)}; the keys of a table are texts", _named(key))
                check_plain(name, key)
                check_plain(inner, (*key, name))
        case list() | tuple():
            for inner in value:
                check_plain(inner, (*key, ""))
        case int() if value.bit_length() > 63:
            raise RayflError(" is a whole number of more than 64 bits; give a smaller one", _named(key))
        case str() if "\0" in value:
            raise RayflError(" has a null character; leave it out", _named(key))


def _named(key: tuple[str, ...]) -> tuple[str, ...]:
    """A path without its empty parts, which are items of lists."""
    return tuple(filter(None, key)) or ("a key",)


def _fitting(value: Value, field: FieldInfo | None) -> Value:
    """The value that a field gets: with tuples in place of lists, unless a third party's field is a list."""
    return value if field is not None and "list[" in str(field.annotation) else _frozen(value)


def _frozen(value: Value) -> Value:
    """Turn the lists of TOML and JSON into tuples: settings are frozen."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def explained_mistake(error: ValidationError, model: type[BaseModel], values: SettingsTable) -> RayflError:
    """The first mistake, in one sentence that names the key, the value and what is allowed."""
    errors = error.errors(include_url=False)
    # A misspelt key that is required is unknown and missing at once, and only the first helps.
    first = next(
        (mistake for mistake in errors if mistake["type"] == "extra_forbidden" and len(mistake["loc"]) == 1), errors[0]
    )
    # A validator of the whole table names no key.
    key = str(next(iter(first["loc"]), ""))
    field = model.model_fields.get(key)
    # Deeper paths lead to an item of a list or a choice of a union, which pydantic names in its own way.
    if len(first["loc"]) > 1 and field is not None and (inner := _inside(field.annotation, values.get(key))):
        return inner.under(key)
    # A choice in a list says by itself what is wrong with it.
    in_list = len(first["loc"]) == 2 and isinstance(first["loc"][1], int)
    says_it = len(first["loc"]) < 2 or (in_list and isinstance(first.get("ctx", {}).get("error"), RayflError))
    kind = first["type"] if says_it else "wrong value"
    if kind == "extra_forbidden":
        return UnknownKey((key,), model.model_fields)
    if kind == "value_error":
        return _refused(first, model)
    assert field is not None
    mistake = " is missing" if kind == "missing" else f"={shown(values.get(key, first['input']))} is not allowed"
    if kind == "missing":
        try:
            model(**{**values, key: {}})
        except RayflError as without_name:
            # A table that needs a name says which names there are.
            if without_name.key == (key, "name"):
                return without_name
    return RayflError(f"{mistake}; it must be {describe(field.annotation, field.metadata)}", (key,))


def _inside(annotation: Foreign, value: Value) -> RayflError | None:
    """The mistake in a table, according to the kind of table that has the most similar keys; None if none has any."""
    kinds = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Settings)
    ]
    if not isinstance(value, Mapping) or not kinds:
        return None

    def likeness(kind: type[Settings]) -> float:
        return sum(len(difflib.get_close_matches(str(key), kind.model_fields, cutoff=0.75)) for key in value)

    meant = max(kinds, key=likeness)
    if not likeness(meant):
        return None
    try:
        meant(**value)
    except RayflError as error:
        return error
    return None


def _refused(first: Mapping[str, Foreign], model: type[BaseModel]) -> RayflError:
    """The error of a validator: a RayflError with its key, or else the class and the file of the validator."""
    reason = first["ctx"]["error"]
    tables = tuple(part for part in first["loc"] if isinstance(part, str))
    if not isinstance(reason, RayflError):
        file = getattr(sys.modules.get(model.__module__), "__file__", None) or model.__module__
        reason = RayflError(f"{reason}{plugin_line(reason) or f' ({model.__qualname__} in {file})'}")
    # The validator of a field names the field itself.
    return reason if tables and reason.key[:1] == tables[-1:] else reason.under(*tables)


def shown(value: object) -> str:
    """A value as a sentence shows it, close to TOML and cut if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Settings):
        value = getattr(value, "name", value)
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe(annotation: Foreign, bounds: Iterable[Foreign] = (), several: bool = False) -> str:
    """The allowed values of a field, in words: "a number in (0, 1]", "'sgd' or 'adam'", "a list of whole numbers"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0], arguments[1:], several)
    if origin is Literal:
        return listed([repr(choice) for choice in arguments], "or")
    if origin in (Union, UnionType):
        choices = [describe(choice, bounds) for choice in arguments if choice is not NoneType]
        return listed(choices, "or") + (", or be left out" if NoneType in arguments else "")
    if origin in (list, tuple):
        length = "" if origin is list or Ellipsis in arguments else f"{len(arguments)} "
        return f"a list of {length}{describe(arguments[0], several=True)}"
    if origin in (abc.Mapping, dict):
        return "a table" if arguments[1] is Any else f"a table of {describe(arguments[1], several=True)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        keys = list(annotation.model_fields)
        return f"a table with {listed(keys, 'and')}" if 0 < len(keys) < 5 else "a table"
    name = getattr(annotation, "__name__", str(annotation))
    singular, plural = KINDS.get(annotation, (f"a value of type {name}", f"values of type {name}"))
    return f"{plural if several else singular}{_range(bounds)}"


def _range(bounds: Iterable[Foreign]) -> str:
    """The bounds of a number (annotated_types' Gt, Ge, Lt, Le) in words; "" without bounds."""
    flat = [part for bound in bounds for part in (bound.metadata if isinstance(bound, FieldInfo) else (bound,))]
    limits = {name: f"{getattr(b, name):g}" for name in ("gt", "ge", "lt", "le") for b in flat if hasattr(b, name)}
    if len(limits) == 2:
        ends = {"gt": "({}", "ge": "[{}", "lt": "{})", "le": "{}]"}
        return f" in {', '.join(ends[name].format(limit) for name, limit in limits.items())}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
    return "".join(f" {words[name]} {limit}" for name, limit in limits.items())


def listed(words: list[str], last: str) -> str:
    """ "a", "a or b", "a, b or c"."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


OURS = ("rayfl", "actors", "jobs")
"""Our own packages. They read all settings, to write them down for example, so their reading does not count."""
_ALL_AT_ONCE = ("__dict__", "model_dump")

_read: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class ThirdPartySetting:
    """A setting that an experiment gives to a third-party class.

    `id`: the class of its settings, and its name. `taker`: the class that it is for, with its file.
    """

    table: str
    id: tuple[str, str]
    value: str
    taker: str


def class_id(kind: type) -> str:
    """The name of a class of settings, which is the same in all processes."""
    return f"{kind.__module__}.{kind.__qualname__}"


def read_here() -> frozenset[tuple[str, str]]:
    """What code in this process has read, as `ThirdPartySetting.id` has it."""
    return frozenset(_read)


def is_ours(kind: type) -> bool:
    """Whether a class is of one of our packages."""
    return kind.__module__.partition(".")[0] in OURS


def watch(kind: type[BaseModel]) -> None:
    """Note which settings of a third-party class are read from now on; a class of ours is left as it is."""
    if is_ours(kind) or "__getattribute__" in vars(kind):
        return
    fields = kind.model_fields
    known = class_id(kind)

    def read(self: BaseModel, name: str) -> object:
        if (name in fields or name in _ALL_AT_ONCE) and _reader(sys._getframe(1)) not in OURS:
            _read.update((known, field) for field in ([name] if name in fields else fields))
        return object.__getattribute__(self, name)

    kind.__getattribute__ = read


def _reader(frame: FrameType | None) -> str:
    """The package of the code that reads; pydantic's own frames are skipped."""
    while frame is not None and (package := frame.f_globals["__name__"].partition(".")[0]) == "pydantic":
        frame = frame.f_back
    return "" if frame is None else package


def require_read(settings: Iterable[ThirdPartySetting], read: frozenset[tuple[str, str]], round_number: int) -> None:
    """Raise UnusedSetting for the first of the settings that is not among those that code has `read` by now."""
    for setting in settings:
        if setting.id not in read:
            raise UnusedSetting(
                f"={setting.value} does nothing: no code of {setting.taker} has read it by the end of round "
                f"{round_number}; remove it and run again, or, if only later rounds need it, read it in __init__",
                (setting.table, setting.id[1]),
            )
