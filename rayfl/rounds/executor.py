"""Executor: where jobs on clients run. `InlineExecutor` runs them here, without Ray; actors/pool.py on Ray actors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayfl.compress.base import Packet
from rayfl.determinism.torch_flags import fixed
from rayfl.gather import Handle
from rayfl.rounds.errors import SMALLER, ClientError, OutOfMemory
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker

# Any: what a reference is only its executor knows (a Ray ObjectRef, or the value itself).
Ref = Any


@dataclass(frozen=True)
class Job:
    """One call on a worker: what to do, the objects it reads, and how many objects it leaves behind."""

    work: Any
    inputs: tuple[Ref, ...] = ()
    num_outputs: int = 0


@dataclass(frozen=True)
class JobResult:
    """A job's small result, and references to its outputs, which stay where they were made."""

    result: Any
    outputs: list[Ref]


class Executor(Protocol):
    """Runs jobs. Results come in the order of the jobs, whoever did them and in whatever order they were ready."""

    num_workers: int

    def put(self, value: Any) -> Ref:
        """Make `value` readable by every worker, once."""
        ...

    def get(self, ref: Ref) -> Any:
        """The value behind a reference."""
        ...

    def handle(self, ref: Ref) -> Handle:
        """A packet's reference as something that workers can open."""
        ...

    def run(self, kind: str, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs. ClientError where a client's own code fails."""
        ...


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

    def __init__(self, setup: Setup) -> None:
        self.worker = Worker(setup)

    def put(self, value: Any) -> Ref:
        """The value itself."""
        return value

    def get(self, ref: Ref) -> Any:
        """The value itself."""
        return ref

    def handle(self, ref: Ref) -> Handle:
        """The packet itself."""
        return InlinePacket(ref)

    def run(self, kind: str, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs here."""
        try:
            with fixed(self.worker.setup.threads, self.worker.setup.device):
                return [self._do(kind, shared, job) for job in jobs]
        except OutOfMemory as error:
            raise ClientError(f"{error}; {SMALLER}") from error

    def _do(self, kind: str, shared: Ref, job: Job) -> JobResult:
        result, outputs = self.worker.do(kind, shared, job.work, job.inputs)
        return JobResult(result, list(outputs))
