"""A name or a table of an experiment file -> the object that it describes.

There is no list to edit. A new subclass of `Compressor`, `Architecture`, `Source`, `PartitionScheme` or `Topology` in
its room is a new compressor, model, dataset, partition or topology, found by its class attribute `name`.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BeforeValidator, PlainSerializer

from rayfl.settings import Settings, SettingsError, UnknownName, nearest, shown


class Choice(Settings):
    """Settings that an experiment file chooses by `name`. `label`: what a user calls one; `package`: where ours lie."""

    name: ClassVar[str]
    label: ClassVar[str]
    package: ClassVar[str]


@cache
def named(kind: type[Choice]) -> dict[str, type[Choice]]:
    """Every concrete subclass of `kind`, of which `label` and `package` are known, by its `name`."""
    room = importlib.import_module(kind.package)
    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{module.name}")
    pending, found = [kind], {}
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            if "name" in vars(subclass) and subclass.__module__.startswith("rayfl."):
                found[vars(subclass)["name"]] = subclass
    return dict(sorted(found.items()))


# Any: tables come from a file, and their values get their types here.
def make(kind: type[Choice], table: Mapping[str, Any]) -> Any:
    """The object that a table with a `name` and options describes, e.g. {"name": "topk", "keep_ratio": 0.1}."""
    known = named(kind)
    if "name" not in table:
        raise SettingsError(f" is missing; a {kind.label} is one of {', '.join(known)}", ("name",))
    name = table["name"]
    if not isinstance(name, str) or name not in known:
        raise UnknownName(f"unknown {kind.label} {shown(name)}: {nearest(str(name), known)}")
    return known[name](**{key: value for key, value in table.items() if key != "name"})


# Any: what a TOML file holds, or an instance from Python.
def resolve(kind: type[Choice], given: Any) -> Any:
    """The object that a table or a name describes; anything else as it is. ValueError where it is none of `kind`.

    `kind` may be narrower than what its package holds (a quantizer among the compressors).
    """
    widest = next(one for one in reversed(kind.__mro__) if "package" in vars(one))
    table = {"name": given} if isinstance(given, str) else given
    # Any: see above.
    found: Any = make(widest, table) if isinstance(table, dict) else given
    if isinstance(found, widest) and not isinstance(found, kind):
        known = [name for name, one in named(widest).items() if issubclass(one, kind)]
        raise ValueError(f"{found.name!r} is no {kind.__name__.lower()}; give one of {', '.join(known)}")
    return found


def from_table(kind: type[Choice]) -> BeforeValidator:
    """For the annotation of a field of type `kind`: it takes a name, a table with a name, or an instance."""
    # Any: see `resolve`.
    return BeforeValidator(lambda given: resolve(kind, given))


# Any: a table of a TOML file.
def to_table(choice: Choice) -> dict[str, Any]:
    """What `make` reads: a field typed by a base class would be written without its settings."""
    return {"name": choice.name, **choice.model_dump()}


TO_TABLE = PlainSerializer(to_table)
