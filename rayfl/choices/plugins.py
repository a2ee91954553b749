"""Loads code from outside the package by the name that an experiment file gives.

- `my_methods.py:FullLength`: a class in a file.
- `my_package.methods:FullLength`: a class in a module that Python can import.
- `full_length`: an entry point `full_length = "my_package.methods:FullLength"` of an installed package, in the group
  `rayfl.plugins`.

A file runs once per process, as a module whose name has a digest of the content, so a copy of the file is the same
module. It may import other files of its folder. They become such modules too, so helper.py of one folder is not that of
another. The files that it reads beside itself are kept with it (beside.py). Other processes never read a file: they get
its source before any object of its classes (`loaded_files`).
"""

import ast
import builtins
import functools
import hashlib
import importlib
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from rayfl.choices.beside import placed, read_beside, watch
from rayfl.errors import PLUGIN_MODULES, RayflError, did_you_mean, plugin_line
from rayfl.limits.regular_files import read_bytes, reading
from rayfl.untyped import Anything

GROUP = "rayfl.plugins"
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_][\w.]*)")
_MODULE = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
MEMORY = "in memory: "
"""The beginning of the name of an object that cannot be imported."""


@dataclass(frozen=True)
class PluginFile:
    """A plugin file: its path, its source when it was read, and the files of its folder that it imports, by module.

    files: its own content and those of the files that it reads, by path, if it can find its folder (beside.py).
    Unpickling a file that the sender has run runs it, once per process.
    """

    path: str
    source: str
    beside: Mapping[str, "PluginFile"] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, above: tuple[str, ...] = ()) -> "PluginFile":
        """Read a file and what it imports. `above`: the modules that import it, which it cannot import.

        Raise OSError; SyntaxError or ValueError if it is not Python.
        """
        source = read_bytes(path).decode("utf-8")
        alias = above[-1] if above else "plugin"
        names = {
            getattr(node, "module", None) or alias.name
            for node in ast.walk(ast.parse(source, str(path)))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        return cls(
            str(path),
            source,
            {
                name: cls.read(file, (*above, path.stem, name))
                for name in sorted(names - {path.stem, *above, *sys.stdlib_module_names})
                if (file := path.with_name(f"{name}.py")).is_file()
            },
            read_beside(path.parent, source, path.stem, alias),
        )

    @property
    def digest(self) -> str:
        """A short name of the content, with that of the files that it imports."""
        imported = [f"{name} {file.digest}" for name, file in self.beside.items()]
        read = [f"{name} {digest(content)}" for name, content in self.files.items()]
        return digest("\n".join((self.source, *imported, *read)).encode())

    @property
    def module(self) -> str:
        """The name of the module that the file becomes."""
        return f"{PLUGIN_MODULES}{self.digest}"

    def copies(self, path: Path) -> Iterator[tuple[str, bytes]]:
        """The paths of the copies of the file and of those that it imports and reads, with their contents. `path`: its
        own, in a folder for all of them."""
        yield str(path), self.source.encode()
        alias = Path(next(iter(self.files), "")).stem
        for name, content in self.files.items():
            stem, dot, ending = name.partition(".")
            yield str(path.parent / (f"{path.stem}{dot}{ending}" if stem == alias else name)), content
        for name, file in self.beside.items():
            yield from file.copies(path.with_name(f"{name}.py"))

    def imported(self, name: str, *arguments: Anything, **more: Anything) -> Anything:
        """What `__import__` gives in this file: a file beside it, or else any module."""
        return _module(self.beside[name]) if name in self.beside else builtins.__import__(name, *arguments, **more)

    def __reduce__(self) -> tuple[Anything, ...]:
        return _arrived, (vars(self), self.module in _files)


_files: dict[str, PluginFile] = {}
"""Every plugin file of this process by its module's name."""


def _arrived(fields: Mapping[str, Anything], run: bool) -> PluginFile:
    """A file that another process sent; run it if that process has."""
    file = PluginFile(**fields)
    if run:
        _run(file)
    return file


def loaded_files() -> tuple[PluginFile, ...]:
    """The plugin files that this process has run so far."""
    return tuple(_files.values())


def digest(content: bytes) -> str:
    """A short name of a file's content."""
    return hashlib.sha256(content).hexdigest()[:12]


def file_of(name: object) -> tuple[str, str] | None:
    """The path and the class of a name that leads to a file; None for every other name."""
    match = _FILE.fullmatch(name) if isinstance(name, str) else None
    return (match["path"], match["name"]) if match else None


def is_reference(name: str) -> bool:
    """Whether a name contains the place of its class."""
    return name.startswith(MEMORY) or bool(_FILE.fullmatch(name) or _MODULE.fullmatch(name))


def load(name: str) -> Anything:
    """The object that `file.py:Class` or `package.module:Class` names. Raise RayflError if there is none."""
    if name.startswith(MEMORY):
        raise RayflError(
            f"{name.removeprefix(MEMORY)} was given from Python and cannot be imported, so only the process that was "
            "given it can run it; put it into a file or a module, and start a new run"
        )
    if (leads := file_of(name)) is not None:
        with reading(Path(leads[0]), "give the path of a Python file", SyntaxError):
            file = PluginFile.read(Path(leads[0]))
        return _member(_run(file), leads[1], leads[0])
    match = _MODULE.fullmatch(name)
    assert match is not None, f"{name!r} is not a reference"
    return _member(_imported(match["module"], name), match["name"], match["module"])


def _run(file: PluginFile) -> ModuleType:
    """The module of a plugin file. RayflError, with the line, if it fails."""
    try:
        return _module(file)
    except BaseException as error:  # noqa: BLE001 (a file may raise anything, SystemExit too)
        raise (error if isinstance(error, KeyboardInterrupt) else _failed(error)) from None


def _module(file: PluginFile) -> ModuleType:
    """The module of a plugin file, which runs the first time. Raise what the file raises."""
    # Whoever only reads names of plugins needs no torch.
    from rayfl.determinism.global_draws import seeded

    if file.module in _files:
        # Keep the newest path: there may be another file at the old one by now.
        _files[file.module] = file
        if file.files:
            # Somebody may have emptied the cache since it ran.
            placed(Path(file.path).parent, file.digest, file.files)
        return sys.modules[file.module]
    module = ModuleType(file.module)
    watch()
    module.__file__ = str(placed(Path(file.path).parent, file.digest, file.files)) if file.files else file.path
    if file.beside:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": file.imported}
    # So that tracebacks show its lines even if this machine lacks the file.
    linecache.cache[file.path] = (len(file.source), None, file.source.splitlines(keepends=True), file.path)
    sys.modules[file.module] = module
    try:
        # What the file draws as it runs is the same in every process.
        with seeded(int(file.digest, 16)):
            exec(compile(file.source, file.path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[file.module]
        raise
    _files[file.module] = file
    return module


def _failed(error: BaseException) -> RayflError:
    """The error of an import, with the innermost line of a plug-in file, or else of any file that is not Python's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    location = plugin_line(error).strip(" ()") or f"{frames[-1].filename}:{frames[-1].lineno}"
    words = " ".join(str(error).split())
    name = getattr(error, "name", None)
    if isinstance(error, ImportError) and (package := Path(location).with_name("__init__.py")).is_file():
        words += f"; {package.parent} is a package: install it with pip, and name the class PACKAGE.MODULE:CLASS"
    if isinstance(error, ModuleNotFoundError) and Path(location).with_name(f"{name}.py").is_file():
        words += f"; {name}.py beside it is found only by `import {name}`, and not if it imports this file, too"
    return RayflError(f"{location} cannot be imported: {type(error).__name__}{f': {words}' if words else ''}")


def _imported(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(error) from None
        parts = Path(*module.split("."))
        here = (path for path in (parts.with_suffix(".py"), parts / "__init__.py") if path.is_file())
        file = next(here, "path/to/file.py")
        raise RayflError(
            f"there is no module {error.name!r} for {name!r}; install it, or name a file as in {file}:"
            f"{name.partition(':')[2]}"
        ) from None
    except BaseException as error:  # noqa: BLE001 (a module may raise anything, SystemExit too)
        raise (error if isinstance(error, KeyboardInterrupt) else _failed(error)) from None


def _reached(module: ModuleType | None, name: str) -> Anything:
    """The object with a dotted name in a module; None if there is none."""
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), module)


def _member(module: ModuleType, name: str, location: str) -> Anything:
    member = _reached(module, name)
    if member is None:
        defined_here = [
            key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
        ]
        raise RayflError(f"{location} has no {name!r}: {did_you_mean(name, defined_here)}")
    if isinstance(member, functools.partial):
        # It has no name of its own.
        vars(member).update(__module__=module.__name__, __qualname__=name)
    return member


@functools.cache
def installed() -> dict[str, str]:
    """The entry points of installed packages: their values by their names."""
    return {entry.name: entry.value for entry in sorted(entry_points(group=GROUP))}


def load_installed(name: str) -> Anything:
    """The object of the entry point `name`. Raise RayflError if there is none."""
    value = installed()[name]
    if not _MODULE.fullmatch(value):
        raise RayflError(f"the installed plugin {name!r} is {value!r}; it must be module:Class")
    return load(value)


def reference(component: Anything) -> str:
    """The name by which `component`, a class or a function, is loaded again."""
    module, name = component.__module__, getattr(component, "__qualname__", repr(component))
    if module in _files:
        return f"{_files[module].path}:{name}"
    value = f"{module}:{name}"
    if entry := next((name for name, known in installed().items() if known == value), None):
        return entry
    can_be_imported = module != "__main__" and _reached(sys.modules.get(module), name) == component
    return value if can_be_imported else f"{MEMORY}{value}"


def is_in_memory(name: object) -> bool:
    """Whether this is the name of an object that cannot be loaded again."""
    return isinstance(name, str) and name.startswith(MEMORY)


def place_of(component: Anything) -> str:
    """The file and line of a class or a function, or else its module."""
    try:
        file = _files.get(component.__module__)
        path = file.path if file else inspect.getsourcefile(component) or inspect.getfile(component)
        return f"{path}:{inspect.getsourcelines(component)[1]}"
    except (OSError, TypeError, AttributeError):
        return getattr(component, "__module__", "") or type(component).__name__


def short(name: str) -> str:
    """The name for legends and titles: only the class if the name contains a place."""
    return name.rpartition(":")[2].strip() if is_reference(name) else name
