"""Finds the object that a name or a table of an experiment file, or an object from Python, describes.

There is no list to edit. A new subclass of `Compressor`, `Architecture`, `Task`, `Source`, `PartitionScheme` or
`Topology` in its package is a new compressor, model, task, dataset, partition or topology, found by its class attribute
`name`; a new file below `rayfl/methods/` is a new method. Classes outside the package are found too (plugins.py).
"""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from pydantic import BeforeValidator, PlainSerializer

from rayfl.choices import plugins
from rayfl.errors import RayflError, UnknownName, did_you_mean, log, some_of
from rayfl.settings import Settings, shown
from rayfl.untyped import Anything, SettingsTable, Value


class Kind:
    """A class that an experiment chooses by `name`. label: the user's word for it; package: where built-in ones are."""

    name: ClassVar[str]
    label: ClassVar[str]
    package: ClassVar[str]
    also: ClassVar[str] = ""
    """What else can be given, which the class `adopts`, as the beginning of a list."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """The present names of attributes and hooks that earlier versions called otherwise; the old ones are refused."""

    def __init_subclass__(cls, **arguments: Anything) -> None:
        super().__init_subclass__(**arguments)
        for old in cls.renamed.keys() & vars(cls).keys():
            raise RayflError(f"{cls.__name__}.{old} is called {cls.renamed[old]} now; rename it")

    @classmethod
    def adopts(cls, candidate: object) -> bool:
        """Whether an object of this kind can be made from `candidate`, such as a torch module, no subclass of it."""
        return False


class Choice(Settings, Kind):
    """A kind whose options are its fields."""

    @classmethod
    def from_options(cls, component: Anything, options: SettingsTable) -> Anything:
        """The object that `component` (a class of this kind, or what the kind `adopts`) makes with options."""
        return component(**options)

    def to_table(self) -> dict[str, Value]:
        """The table from which `make` makes this object again."""
        return {"name": reference(type(self)), **self.model_dump()}


# `cache` forgets the type of the kind.
@cache
def named(kind: Anything) -> Anything:
    """All classes of `kind` in the package of the kind, and in packages inside it, by their attribute `name`."""
    package = importlib.import_module(kind.package)
    classes = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            is_defined_here = isinstance(value, type) and issubclass(value, kind) and value.__module__ == module.name
            if is_defined_here and isinstance(name := vars(value).get("name"), str):
                other = classes.setdefault(name, value)
                assert other is value, f"{other} and {value} are called {name!r}"
    return dict(sorted(classes.items()))


def installed(kind: type[Kind]) -> dict[str, Anything]:
    """The plugins of a kind in installed packages, by name; one that cannot be loaded is left out with a warning."""
    loaded = {}
    for name in plugins.installed():
        try:
            loaded[name] = plugins.load_installed(name)
        except RayflError as error:
            log.warning(f"the plugin {name!r} cannot be used: {error}")
    return {name: component for name, component in loaded.items() if _is(kind, component)}


def known(kind: type[Kind]) -> dict[str, Anything]:
    """All choices of a kind that have a plain name: plugins of installed packages, and built-in ones, which are the
    ones that a common name denotes."""
    return {**installed(_widest(kind)), **named(_widest(kind))}


def find(kind: type[Kind], given: Value) -> Anything:
    """The class that a name of an experiment, or an object from Python, stands for. Raise RayflError if there is
    none."""
    ours = named(_widest(kind))
    if callable(given):
        return _checked(kind, given)
    if isinstance(given, str):
        if plugins.is_reference(given):
            return _checked(kind, plugins.load(given))
        if given in ours:
            return ours[given]
        if given in plugins.installed():
            return _checked(kind, plugins.load_installed(given))
        if given.endswith(".py"):
            raise RayflError(f"{given!r} names a file only; name its class too, as in {given}:Class")
    raise UnknownName(f"unknown {kind.label} {shown(given)}: {did_you_mean(str(given), known(kind))}")


# Type checkers cannot know that the result is a `Choice` for a `Choice`.
def _widest(kind: type[Kind]) -> Anything:
    """The kind that has a package of its own: Compressor for a quantizer."""
    return next(base for base in reversed(kind.__mro__) if issubclass(base, Kind) and "package" in vars(base))


def _is(kind: type[Kind], component: object) -> bool:
    """Whether `component` is a class of a kind, or can be made into one."""
    return (isinstance(component, type) and issubclass(component, kind)) or kind.adopts(component)


def _checked(kind: type[Kind], component: Anything) -> Anything:
    """`component`, with a name of its own if it is a third-party class. Raise RayflError if it is not of this kind."""
    widest = _widest(kind)
    word = getattr(component, "__qualname__", shown(component))
    if not _is(widest, component):
        raise RayflError(
            f"{plugins.place_of(component)}: {word!r} is no {kind.label}; give {widest.also}a subclass of "
            f"{widest.__module__}.{widest.__name__}"
        )
    if not isinstance(component, type) or not issubclass(component, Kind) or component in named(widest).values():
        return component
    if inspect.isabstract(component):
        lacks = ", ".join(sorted(getattr(component, "__abstractmethods__", ())))
        raise RayflError(f"{plugins.place_of(component)}: the {kind.label} {word!r} lacks {lacks}; define it")
    if vars(component).get("name") in named(widest):
        raise RayflError(
            f"{plugins.place_of(component)}: the {kind.label} {word!r} is called {component.name!r}, which is the name "
            "of one of ours; give it another name, or none"
        )
    if "name" not in vars(component):
        component.name = component.__name__
    return component


def reference(component: Anything) -> str:
    """The name by which an experiment finds a class again."""
    ours = named(_widest(component)) if isinstance(component, type) and issubclass(component, Kind) else {}
    name = next((name for name, known in ours.items() if known is component), None)
    return name or plugins.reference(component)


def make(kind: type[Choice], table: SettingsTable) -> Anything:
    """The object that a table with a `name` and options describes, e.g. {"name": "topk", "keep_ratio": 0.1}."""
    if "name" not in table:
        raise RayflError(f" is missing; a {kind.label} is one of {some_of(known(kind))}", ("name",))
    component = find(kind, table["name"])
    return kind.from_options(component, {key: value for key, value in table.items() if key != "name"})


def resolve(kind: type[Choice], given: Value, field: str | None = None) -> Anything:
    """The object that a name, a table or a class describes; an instance is returned unchanged.

    Raise RayflError if it is not of `kind`, which may be narrower than its package (a quantizer among the compressors).
    """
    widest = _widest(kind)
    if isinstance(given, widest):
        _checked(widest, type(given))
    component = given if isinstance(given, widest) else make(widest, as_table(given, field))
    if isinstance(component, widest) and not isinstance(component, kind):
        narrow = ", ".join(name for name, component in named(widest).items() if issubclass(component, kind))
        raise RayflError(f"{component.name!r} is no {kind.__name__.lower()}; give one of {narrow}")
    return component


def as_table(given: Value, field: str | None) -> dict[str, Value]:
    """The table that is given; a bare name, class or function becomes a table with only a name."""
    if isinstance(given, str) or callable(given):
        return {"name": given}
    if not isinstance(given, Mapping):
        mistake = f"={shown(given)} is not allowed; it must be a name, or a table with a name"
        raise RayflError(mistake, () if field is None else (field,))
    return dict(given)


def from_table(kind: type[Choice]) -> BeforeValidator:
    """A validator for fields of type `kind`, which take a name, a table with a name, a class or an instance."""
    return BeforeValidator(lambda given, info: resolve(kind, given, info.field_name))


TO_TABLE = PlainSerializer(lambda choice: choice.to_table())
"""A serialiser for such fields. By itself, pydantic writes the fields of the base class only."""
