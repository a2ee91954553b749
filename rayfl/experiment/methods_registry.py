"""Methods by name: a new file in `rayfl/methods/` is a new method, called as the file is."""

import importlib
import inspect
import pkgutil
from functools import cache
from types import ModuleType

import rayfl.methods
from rayfl.methods.base import Method
from rayfl.settings import UnknownName, nearest, shown


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


def method(name: str) -> type[Method]:
    """The method class of that name; SettingsError with the nearest known name."""
    if not isinstance(name, str) or name not in methods():
        raise UnknownName(f"unknown method {shown(name)}: {nearest(str(name), methods())}")
    return methods()[name]
