"""The ways in which the contract tests run an experiment, and the comparison of its runs, bit for bit or up to a
tolerance: of records, and of everything that outlives a round.

`Apart` has workers of one process that share nothing, as actors do not: each has a setup of its own, and what modules
and classes of plug-ins hold is exchanged before each of its jobs.
"""

import copy
import pickle
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from types import FunctionType, ModuleType

import numpy as np
import torch
from torch import Tensor

from rayfl.choices import plugins
from rayfl.compress.base import Packet
from rayfl.gather import Handle
from rayfl.methods.base import Capabilities
from rayfl.rounds.executor import Executor, InlineExecutor, InlinePacket, Job, JobResult, Ref
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import simulate
from rayfl.rounds.run_state import Air, RunState
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker
from rayfl.settings import OURS
from rayfl.task import NetworkTask
from rayfl.topology.mixing import FITTING
from rayfl.untyped import Anything, Value


class Shuffled(InlineExecutor):
    """Three workers that do their jobs in a random order, and get all values as bytes with read-only arrays."""

    num_workers = 3

    def __init__(self, setup: Setup) -> None:
        super().__init__(pickle.loads(pickle.dumps(setup)))  # noqa: S301 - our own bytes
        self.order = np.random.default_rng(0)

    def put(self, value: Anything) -> Ref:
        return frozen(value)

    def get(self, ref: Ref) -> Anything:
        return thawed(ref)

    def handle(self, ref: Ref) -> Handle:
        packet = thawed(ref)
        assert isinstance(packet, Packet)
        return InlinePacket(packet)

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        done: dict[int, JobResult] = {}
        for index in self.order.permutation(len(jobs)).tolist():
            inputs = tuple(None if ref is None else thawed(ref) for ref in jobs[index].inputs)
            (result,) = super().run(thawed(shared), [Job(thawed(frozen(jobs[index].work)), inputs)])
            assert len(result.outputs) == jobs[index].num_outputs
            done[index] = JobResult(thawed(frozen(result.result)), [frozen(output) for output in result.outputs])
        return [done[index] for index in range(len(jobs))]


Frozen = tuple[bytes, list[bytes]]


def frozen(value: Anything) -> Frozen:
    """The value as bytes, with large arrays out of band, as Ray stores them."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, [buffer.raw().tobytes() for buffer in buffers]


def thawed(ref: Frozen) -> Anything:
    """The value, its arrays read-only."""
    return pickle.loads(ref[0], buffers=ref[1])  # noqa: S301 - our own bytes


def play(
    setup: Setup, executor: Executor | None = None, run_state: RunState | None = None, rounds: int | None = None
) -> tuple[list[RoundRecord], list[RunState]]:
    """The records, and the run state after each round."""
    kept: list[tuple[RoundRecord, RunState]] = []
    simulate(setup, executor or InlineExecutor(setup), lambda *both: kept.append(both), run_state, rounds)
    return [record for record, _ in kept], [run_state for _, run_state in kept]


def rows(records: Sequence[RoundRecord]) -> list[tuple[Anything, ...]]:
    """Everything recorded but the wall clock."""
    return [(replace(record.row, wall_s=0.0), record.clients, record.metrics) for record in records]


def contents(executor: Executor, run_state: RunState) -> dict[str, np.ndarray]:
    """Every array that outlives a round, by its place: the states of the server and of the selection, the flights under
    way, and the states and memories of clients."""
    trees = {"server": run_state.server, "selection": run_state.selection, "told": run_state.told}
    trees |= {"air": run_state.air.to_arrays()} if run_state.air != Air() else {}
    trees |= {f"version {version}": executor.get(ref) for version, ref in run_state.air.versions.items()}
    trees |= {"clocks": run_state.clocks.to_arrays()} if run_state.clocks.peers else {}
    kinds = {"state": run_state.states, "server memory": run_state.server_memories, **run_state.clocks.objects()}
    for kind, refs in kinds.items():
        trees |= {f"{kind} {client}": executor.get(ref) for client, ref in sorted(refs.items())}
    return {place: array for name, tree in trees.items() for place, array in leaves(name, tree).items()}


def leaves(place: str, value: Anything) -> dict[str, np.ndarray]:
    """All arrays below `value`."""
    if isinstance(value, Mapping):
        return {name: leaf for key, part in value.items() for name, leaf in leaves(f"{place}/{key}", part).items()}
    if isinstance(value, Packet):
        return leaves(place, value.parts)
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else getattr(value, "bits", value)
    if isinstance(array, np.ndarray):
        return {place: array}
    assert not isinstance(value, Tensor) and hasattr(value, "open"), (
        f"{place} holds a {type(value).__name__}, which no checkpoint can keep"
    )
    return leaves(place, value.open())


def assert_same_bits(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    """Both have the same arrays, with the same types, shapes and bits."""
    assert list(a) == list(b)
    for place, array in a.items():
        assert (array.dtype, array.shape, array.tobytes()) == (b[place].dtype, b[place].shape, b[place].tobytes()), (
            place
        )


def assert_close(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Every array agrees to `tolerance` of its largest entry."""
    assert list(a) == list(b)
    for place, array in a.items():
        size = max(np.abs(array).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(b[place], array, rtol=0, atol=tolerance * size, err_msg=place)


def fitting_graph(can: Capabilities) -> dict[str, Value]:
    """A `[topology]` table that gives a method what it needs, whoever is absent."""
    weights = FITTING[can.needs_weights]
    ring = {"name": "ring"} if weights == "uniform" else {"name": "ring", "weights": weights}
    return {"name": "grid", "rows": 1} if can.needs_tree else ring


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
        """The names of the values that differ between workers, as some worker's jobs have changed them."""
        first, *others = (held(kept, worker.setup) for kept, worker in zip(self.kept, self.workers, strict=True))
        return [name for name in first if any(other.get(name) != first[name] for other in others)]


def owners(setup: Setup) -> list[Owner]:
    """The modules and classes of plug-ins whose values each actor has for itself."""
    kinds = [kind for plugin in plugged(setup) for kind in type(plugin).__mro__ if _is_foreign(kind)]
    names = {file.module for file in plugins.loaded_files()} | {kind.__module__ for kind in kinds}
    modules = [sys.modules[name] for name in sorted(names)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [*dict.fromkeys([*modules, *(kind for kind in classes if kind.__module__ in names)])]


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


def held(kept: KeptValues, setup: Setup) -> dict[str, bytes | None]:
    """The bytes of kept values and in the objects of a setup, by the values' names."""
    held_bytes: dict[str, bytes | None] = {}
    for (owner, name), value in kept.items():
        prefix = f"{owner.__qualname__}." if isinstance(owner, type) else f"{owner.__file__}: "
        held_bytes[prefix + name] = as_bytes(value)
    for plugin in (part for part in plugged(setup) if any(map(_is_foreign, type(part).__mro__))):
        held_bytes |= {
            f"{type(plugin).__qualname__}().{name}": as_bytes(value)
            for name, value in vars(plugin).items()
            if not _is_made(plugin, name)
        }
    return held_bytes


def as_bytes(value: Anything) -> bytes | None:
    """A value as something that can be compared; None if it cannot be pickled."""
    # A lambda, a lock or an open file cannot be pickled, each with another error.
    with suppress(Exception):
        return pickle.dumps(value)
    return None


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _FOREIGN


def _is_made(plugin: object, name: str) -> bool:
    """Whether an attribute follows from others: a cached property, or a part of a method or a module with its own."""
    is_part = (isinstance(plugin, torch.nn.Module) and name.startswith("_")) or name in ("task", "inner", "wrapper")
    return is_part or isinstance(getattr(type(plugin), name, None), cached_property)
