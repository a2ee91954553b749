"""Executor: runs jobs on clients. `InlineExecutor` runs them in this process, actors/ray_executor.py on Ray actors."""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rayfl.compress.base import Packet
from rayfl.determinism.torch_flags import fixed
from rayfl.errors import SMALLER, ClientError, OutOfMemory
from rayfl.gather import Handle
from rayfl.rounds.resources import Meter, Use
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker
from rayfl.settings import read_here
from rayfl.untyped import Anything

Ref = Anything
"""A reference to a value, of a type that only the executor knows: a Ray ObjectRef, or the value itself."""


@dataclass(frozen=True)
class Job:
    """One call on a worker: what to do, references to the values it reads, and the number of values it returns.

    kept: positions of the values that later rounds read, one range for each kind. `together`: how many of a kind may
    share an object of the store.
    """

    work: Anything
    inputs: tuple[Ref, ...] = ()
    num_outputs: int = 0
    kept: tuple[range, ...] = ()
    together: int = 1

    @property
    def kind(self) -> str:
        """The kind of work in a word or two: "train" for a `TrainJob`, "mean model" for a `MeanModelJob`."""
        return re.sub("(?<=[a-z])(?=[A-Z])", " ", type(self.work).__name__.removesuffix("Job")).lower()


@dataclass(frozen=True)
class JobResult:
    """A job's small result, and references to its outputs, which stay on the node where they were made."""

    result: Anything
    outputs: list[Ref]


@dataclass(frozen=True)
class Wave:
    """Progress of the jobs of one `run`: their kind, the number of clients that are done, and of all clients."""

    kind: str
    done: int
    total: int

    @classmethod
    def of(cls, jobs: Sequence[Job], done: Iterable[Job] = ()) -> Self:
        """Progress of `jobs`, of which those in `done` are done. Jobs on the pooled test set have no clients."""
        return cls(jobs[0].kind if jobs else "", num_clients(done), num_clients(jobs))


OnWave = Callable[[Wave], None]


def num_clients(jobs: Iterable[Job]) -> int:
    """The number of clients that jobs are about; 0 for jobs on the pooled test set."""
    return sum(len(getattr(job.work, "clients", ())) for job in jobs)


class Executor(Protocol):
    """Runs jobs. Results are in the order of the jobs, whichever worker did them and whenever they were ready."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that take jobs now."""

    @abstractmethod
    def put(self, value: Anything) -> Ref:
        """Store `value` once, so that every worker can read it."""

    @abstractmethod
    def put_all(self, values: Iterable[Anything]) -> list[Ref]:
        """Store values that later rounds read, each with a reference of its own."""

    @abstractmethod
    def get(self, ref: Ref) -> Anything:
        """The value behind a reference."""

    @abstractmethod
    def handle(self, ref: Ref) -> Handle:
        """A handle with which workers can open the packet behind a reference."""

    @abstractmethod
    def settings_read(self) -> frozenset[tuple[str, str]] | None:
        """The settings that code has read in all processes (`ThirdPartySetting.id`); None if one does not answer."""

    @abstractmethod
    def used(self) -> list[Use]:
        """What the processes have used of their machines since the executor began, this one among them."""

    @abstractmethod
    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs, which are of one class. Raise ClientError if a client's own code fails."""


@dataclass(frozen=True)
class InlinePacket:
    """A packet in this process."""

    packet: Packet

    def open(self) -> Packet:
        """The packet."""
        return self.packet


class InlineExecutor:
    """Runs every job in this process, one after another, with the setup's thread count."""

    num_workers = 1

    def __init__(self, setup: Setup, on_wave: OnWave = lambda wave: None) -> None:
        """`on_wave` is called whenever a client is trained or evaluated."""
        self._meter = Meter(setup.device)
        self.worker = Worker(setup, self._client_done)
        self._on_wave, self._wave = on_wave, Wave("", 0, 0)

    def put(self, value: Anything) -> Ref:
        """The value itself."""
        return value

    def put_all(self, values: Iterable[Anything]) -> list[Ref]:
        """The values themselves."""
        return [self.put(value) for value in values]

    def get(self, ref: Ref) -> Anything:
        """The value itself."""
        return ref

    def handle(self, ref: Ref) -> Handle:
        """The packet itself."""
        return InlinePacket(ref)

    def settings_read(self) -> frozenset[tuple[str, str]]:
        """The settings that code has read in this process."""
        return read_here()

    def used(self) -> list[Use]:
        """What this process has used."""
        return [self._meter.read()]

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs in this process."""
        self._wave = Wave.of(jobs)
        setup = self.worker.setup
        try:
            with fixed(setup.threads, setup.device, setup.precision):
                return [self._do(shared, job) for job in jobs]
        except OutOfMemory as error:
            raise ClientError(f"{error}; {SMALLER}") from error

    def _client_done(self) -> None:
        self._wave = Wave(self._wave.kind, self._wave.done + 1, self._wave.total)
        self._on_wave(self._wave)

    def _do(self, shared: Ref, job: Job) -> JobResult:
        result, outputs = self.worker.do(job.work, shared, job.inputs)
        return JobResult(result, list(outputs))
