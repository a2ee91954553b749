"""Workers of one process that share nothing, as actors do not, and the values that plug-ins keep from call to call.

Each worker has a setup of its own, and what modules and classes of plug-ins hold is exchanged before each of its jobs.
"""

import copy
import pickle
import sys
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property
from types import FunctionType, ModuleType

import torch

from rayfl.choices import plugins
from rayfl.rounds.executor import Job, JobResult
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker
from rayfl.settings_read import OURS
from rayfl.task import NetworkTask
from rayfl.testing.executors import Shuffled
from rayfl.untyped import Anything

Owner = Anything
KeptValues = dict[tuple[Owner, str], Anything]

_FOREIGN = (*OURS, "builtins", "abc", "typing", "pydantic", "torch", "torchvision", "collections", "numpy", "enum")
"""Packages whose classes keep nothing of a run."""
_NO_DATA = (FunctionType, ModuleType, type, classmethod, staticmethod, property, cached_property)


class Apart(Shuffled):
    """`num_workers` workers, each with the values that plug-ins keep in modules, classes and objects for itself."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        super().__init__(setup)
        self.num_workers = num_workers
        self.workers = [Worker(pickle.loads(pickle.dumps(setup))) for _ in range(num_workers)]  # noqa: S301 - our own
        self.owners = owners(setup)
        self.kept = [copied(values(self.owners)) for _ in self.workers]
        self.first = [held(kept, worker.setup) for kept, worker in zip(self.kept, self.workers, strict=True)]
        self.turn = 0

    def _do(self, shared: Anything, job: Job) -> JobResult:
        self.turn = (self.turn + 1) % self.num_workers
        before = values(self.owners)
        self.worker = self.workers[self.turn]
        put(self.owners, self.kept[self.turn])
        try:
            return super()._do(shared, job)
        finally:
            self.kept[self.turn] = values(self.owners)
            put(self.owners, before)

    @property
    def changed(self) -> list[str]:
        """The names of the values that some worker's jobs have changed."""
        names: dict[str, None] = {}
        for first, kept, worker in zip(self.first, self.kept, self.workers, strict=True):
            now = held(kept, worker.setup)
            names |= dict.fromkeys(name for name in now if now[name] != first.get(name))
        return [*names]


def owners(setup: Setup) -> list[Owner]:
    """The modules and classes of plug-ins whose values each actor has for itself."""
    kinds = [kind for plugin in plugged(setup) for kind in type(plugin).__mro__ if _is_foreign(kind)]
    modules = {file.module for file in plugins.loaded_files()} | {kind.__module__ for kind in kinds}
    by_id: dict[int, Owner] = {}
    for module in (sys.modules[name] for name in sorted(modules)):
        inside = [
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
        ]
        by_id |= {id(owner): owner for owner in (module, *inside)}
    return [*by_id.values()]


def plugged(setup: Setup) -> list[Anything]:
    """The objects of a setup that may be a plug-in's."""
    objects: list[Anything] = [setup.method]
    while (inner := getattr(objects[-1], "inner", None)) is not None:
        objects.append(inner)
    objects += [method.wrapper for method in objects if hasattr(method, "wrapper")]
    objects += [setup.uplink, setup.downlink, setup.selection, setup.schedule, setup.topology, *setup.metrics]
    if isinstance(task := setup.method.task, NetworkTask):
        objects += [task.task, *task.network.module.modules()]
    return objects


def values(owners: Collection[Owner]) -> KeptValues:
    """What the owners hold, by owner and name; functions, classes and modules are no values."""
    return {
        (owner, name): value
        for owner in owners
        for name, value in vars(owner).items()
        if not (name.startswith(("__", "_abc_", "model_")) or isinstance(value, _NO_DATA))
    }


def copied(values: KeptValues) -> KeptValues:
    """Copies; the same object stays the same one. What cannot be copied is shared."""
    copies = dict(values)
    memo = dict[int, Anything]()
    for key, value in values.items():
        # An object of a library may refuse in any way.
        with suppress(Exception):
            copies[key] = copy.deepcopy(value, memo)
    return copies


def put(owners: Collection[Owner], kept: KeptValues) -> None:
    """Let the owners hold these values, and no others."""
    for owner, name in values(owners).keys() - kept.keys():
        delattr(owner, name)
    for (owner, name), value in kept.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


def held(kept: KeptValues, setup: Setup) -> dict[str, bytes | str]:
    """The bytes of kept values and in the objects of a setup, by the values' names."""
    held_bytes: dict[str, bytes | str] = {}
    for (owner, name), value in kept.items():
        prefix = f"{owner.__qualname__}." if isinstance(owner, type) else f"{owner.__file__}: "
        held_bytes[prefix + name] = as_bytes(value)
    for plugin in (part for part in plugged(setup) if any(map(_is_foreign, type(part).__mro__))):
        attributes = {name: value for name, value in vars(plugin).items() if not _is_made(plugin, name)}
        held_bytes |= {f"{type(plugin).__qualname__}().{name}": as_bytes(value) for name, value in attributes.items()}
    return held_bytes


def as_bytes(value: Anything) -> bytes | str:
    """A value as something that can be compared."""
    # A lambda, a lock or an open file cannot be pickled, each with another error.
    with suppress(Exception):
        return pickle.dumps(value)
    return repr(value)


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _FOREIGN


def _is_made(plugin: object, name: str) -> bool:
    """Whether an attribute follows from others: a cached property, or a part of a method or a module with its own."""
    is_part = (isinstance(plugin, torch.nn.Module) and name.startswith("_")) or name in ("task", "inner", "wrapper")
    return is_part or isinstance(getattr(type(plugin), name, None), cached_property)
