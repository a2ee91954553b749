"""Finds what can be named in an experiment file: methods by file name, everything else by its class attribute `name`.

There is no list to edit: a new file in `rayfl/methods/` is a new method; a new subclass of `Compressor`,
`Architecture`, `Source`, `Scheme` or `Topology` in its room is a new compressor, model, dataset, partition or topology.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import rayfl.compress
import rayfl.data
import rayfl.methods
from rayfl.compress.base import Compressor
from rayfl.data.datasets import Source
from rayfl.data.partition import Scheme
from rayfl.methods.base import Method
from rayfl.models import Architecture
from rayfl.settings import Settings, SettingsError, UnknownName, nearest, shown
from rayfl.topology.graphs import Topology

ROOMS: Mapping[type[Settings], tuple[str, str]] = {
    Compressor: ("rayfl.compress", "compressor"),
    Source: ("rayfl.data.sources", "dataset"),
    Scheme: ("rayfl.data.partitions", "partition"),
    Architecture: ("rayfl.models", "model"),
    Topology: ("rayfl.topology", "topology"),
}


@cache
def methods() -> dict[str, type[Method]]:
    """Every method by its file's name."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(rayfl.methods.__path__):
        if module.name != "base" and not module.ispkg:
            found[module.name] = method_of(importlib.import_module(f"rayfl.methods.{module.name}"))
    return found


def method_of(module: ModuleType) -> type[Method]:
    """The one method that a module defines."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    assert len(own) == 1, f"{module.__name__} must define exactly one method, and defines {len(own)}"
    return own[0]


@cache
def named(kind: type[Settings]) -> dict[str, type[Settings]]:
    """Every concrete subclass of `kind` (a key of ROOMS) by its `name`."""
    room = importlib.import_module(ROOMS[kind][0])
    for module in pkgutil.iter_modules(getattr(room, "__path__", ())):
        importlib.import_module(f"{room.__name__}.{module.name}")
    pending, found = [kind], {}
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            if "name" in vars(subclass) and subclass.__module__.startswith("rayfl."):
                found[vars(subclass)["name"]] = subclass
    return dict(sorted(found.items()))


def method(name: str) -> type[Method]:
    """The method class of that name; SettingsError with the nearest known name."""
    if not isinstance(name, str) or name not in methods():
        raise UnknownName(f"unknown method {shown(name)}: {nearest(str(name), methods())}")
    return methods()[name]


# Any: tables come from a file, and their values get their types here.
def make(kind: type[Settings], table: Mapping[str, Any]) -> Any:
    """The object that a table with a `name` and options describes, e.g. {"name": "topk", "keep_ratio": 0.1}."""
    label, known = ROOMS[kind][1], named(kind)
    if "name" not in table:
        raise SettingsError(f" is missing; a {label} is one of {', '.join(known)}", ("name",))
    name = table["name"]
    if not isinstance(name, str) or name not in known:
        raise UnknownName(f"unknown {label} {shown(name)}: {nearest(str(name), known)}")
    return known[name](**{key: value for key, value in table.items() if key != "name"})


def compressor(table: Mapping[str, Any]) -> Compressor:
    """The compressor that a table describes."""
    return make(Compressor, table)
