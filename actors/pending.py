"""The calls of client actors in one wave: waiting, in flight, done or failed."""

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from actors.client import Actor
from actors.errors import ClusterError, LostObjects, unwrapped
from actors.locality import Inputs, WaitingJobs
from actors.losses import Cause
from rayfl.rounds.errors import ClientError
from rayfl.rounds.executor import Job, JobResult, Ref, Wave
from rayfl.rounds.worker_jobs import RoundInputs


@dataclass(frozen=True)
class Call:
    """A job in flight."""

    index: int
    actor: Actor
    outputs: list[ObjectRef]
    deadline: float


@dataclass
class PendingCalls:
    """The jobs of one `run`: waiting, in flight, done or failed.

    `inputs`: where each job's inputs are stored, () if nobody looked; `nodes`: the nodes that have actors.
    """

    shared: Ref
    jobs: Sequence[Job]
    inputs: Sequence[Inputs] = ()
    nodes: Collection[str] = ()
    waiting: WaitingJobs = field(init=False)
    losses: Counter[tuple[int, Cause]] = field(default_factory=Counter)
    done: dict[int, JobResult] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    flying: dict[ObjectRef, Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = self.inputs or [Inputs()] * len(self.jobs)
        self.waiting = WaitingJobs([one.home(self.nodes) for one in self.inputs])

    def fail(self, index: int, error: BaseException) -> None:
        """Note a job's error. No later job is sent, as a single worker would not have reached it."""
        self.failed[index] = error
        self.waiting.keep_before(min(self.failed))

    def send_again(self, index: int) -> None:
        """Let a job wait again, unless an earlier one has failed."""
        if index < min(self.failed, default=len(self.jobs)):
            self.waiting.put_back(index)

    @property
    def deadline(self) -> float:
        """When the first call in flight will have taken too long."""
        return min((call.deadline for call in self.flying.values()), default=math.inf)

    @property
    def wave(self) -> Wave:
        """The progress of the jobs."""
        return Wave.of(self.jobs, [self.jobs[index] for index in self.done])

    def late(self) -> list[ObjectRef]:
        """The calls in flight that have taken too long."""
        now = time.monotonic()
        return [ref for ref, call in self.flying.items() if call.deadline <= now]

    def about(self, call: Call) -> str:
        """The round, step and clients of a call, for a sentence."""
        about: RoundInputs = ray.get(self.shared)
        job = self.jobs[call.index]
        clients = getattr(job.work, "clients", ())
        of = f", clients {clients[0]} to {clients[-1]}" if clients else ""
        return f"round {about.round}, {job.kind}{of}"

    def readable(self, call: Call, error: RayTaskError) -> BaseException:
        """The error that a call raised, with its round: ClientError, or ClusterError if an input was lost."""
        cause = unwrapped(error)
        if isinstance(cause, ClientError):
            return cause
        kind_of_error = ClientError
        if isinstance(cause, RayError):
            kind_of_error = LostObjects if isinstance(cause, ObjectLostError) else ClusterError
        wrapped = kind_of_error(f"{self.about(call)}: {type(cause).__name__}: {cause}")
        wrapped.add_note(str(error))
        return wrapped
