"""RayExecutor: jobs on a pool of ClientActors. Actors that die are replaced and their calls sent again.

A job goes to whichever actor is free, one call in flight an actor. What a call returns belongs to the caller, so the
death of an actor loses nothing but the call that it was working on. `max_restarts` and `max_task_retries` stay 0:
Ray's own restarts would run a call on an actor without its setup.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from actors.client import Actor, ClientActor
from actors.errors import ClusterError, unwrapped
from actors.placement import Placement
from rayfl.compress.base import Packet
from rayfl.executor import Done, Job, Ref
from rayfl.gather import Handle
from rayfl.work import ClientError, Shared

TRIES = 4
"""How often a call may lose its actor before the run gives up on it, and how many new actors in a row may fail."""


@dataclass(frozen=True)
class Stored:
    """A packet in the object store."""

    ref: ObjectRef

    def open(self) -> Packet:
        """Read the packet, without a copy where it lies on this node."""
        return ray.get(self.ref)


@dataclass(frozen=True)
class Starting:
    """An actor that is on its way."""

    actor: Actor
    deadline: float


@dataclass(frozen=True)
class Call:
    """A job in flight."""

    index: int
    actor: Actor
    refs: list[ObjectRef]


class RayExecutor:
    """The `Executor` of rayfl on Ray actors. `close` ends the actors."""

    def __init__(self, setup: ObjectRef, placement: Placement) -> None:
        """Start the actors. ClusterError if they are not ready in time; SettingsError for what they cannot do."""
        self.placement, self.num_workers = placement, placement.num_actors
        self.pids: dict[Actor, int] = {}
        self._setup = setup
        self._idle: deque[Actor] = deque()
        self._starting: dict[ObjectRef, Starting] = {}
        self._false_starts = 0
        for _ in range(self.num_workers):
            self._start()
        try:
            while self._starting:
                self._wait([])
        except BaseException:
            self.close()
            raise

    def put(self, value: Any) -> Ref:
        """Into the object store."""
        return ray.put(value)

    def get(self, ref: Ref) -> Any:
        """From the object store; large arrays are read-only views of it."""
        return ray.get(ref)

    def handle(self, ref: Ref) -> Handle:
        """A packet's reference, which any worker can open."""
        return Stored(ref)

    def run(self, kind: str, shared: Ref, jobs: Sequence[Job]) -> list[Done]:
        """Do all jobs. ClientError where a client's own code fails, or where a call loses its actor again and again.

        After an error no further job is sent, and of the errors of those under way the one of the first job is raised:
        since jobs are sent in order, it is the one that a single worker would have met.
        """
        waiting, tries = deque(range(len(jobs))), [0] * len(jobs)
        done: dict[int, Done] = {}
        failed: dict[int, BaseException] = {}
        flying: dict[ObjectRef, Call] = {}
        while flying or (waiting and not failed):
            while waiting and self._idle and not failed:
                call = self._send(waiting.popleft(), kind, shared, jobs)
                flying[call.refs[0]] = call
            for ref in self._wait(list(flying)):
                call = flying.pop(ref)
                try:
                    done[call.index] = Done(ray.get(ref), call.refs[1:])
                    self._idle.append(call.actor)
                except RayTaskError as error:
                    failed[call.index] = readable(error, kind, shared, jobs[call.index])
                    self._idle.append(call.actor)
                except RayError as error:
                    self._replace(call.actor)
                    tries[call.index] += 1
                    if tries[call.index] == TRIES:
                        failed[call.index] = lost(error, kind, shared, jobs[call.index])
                    waiting.appendleft(call.index)
        if failed:
            raise failed[min(failed)]
        return [done[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.pids, *(starting.actor for starting in self._starting.values())]:
            ray.kill(actor)
        self.pids.clear()
        self._starting.clear()
        self._idle.clear()

    def _send(self, index: int, kind: str, shared: Ref, jobs: Sequence[Job]) -> Call:
        job, actor = jobs[index], self._idle.popleft()
        answer = actor.call.options(num_returns=1 + job.num_outputs).remote(kind, shared, job.work, *job.inputs)
        return Call(index, actor, answer if job.num_outputs else [answer])

    def _start(self) -> None:
        size = self.placement
        actor = ClientActor.options(num_cpus=size.num_cpus, num_gpus=size.num_gpus).remote()
        joined = actor.join.remote([self._setup], size.num_gpus)
        self._starting[joined] = Starting(actor, time.monotonic() + size.start_timeout_s)

    def _replace(self, actor: Actor) -> None:
        """A new actor for one that died, or that cannot be reached and must not go on."""
        ray.kill(actor)
        self.pids.pop(actor, None)
        self._start()

    def _wait(self, calls: list[ObjectRef]) -> list[ObjectRef]:
        """Wait for one of the calls or for a new actor; returns the calls that are over."""
        deadline = min((starting.deadline for starting in self._starting.values()), default=None)
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        refs = [*calls, *self._starting]
        ready, _ = ray.wait(refs, num_returns=1, timeout=patience)
        if not ready:
            raise ClusterError(self._late())
        also_ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in [ref for ref in also_ready if ref in self._starting]:
            self._welcome(ref)
        return [ref for ref in also_ready if ref in calls]

    def _welcome(self, ref: ObjectRef) -> None:
        """Take a new actor in; start another one if it died on the way."""
        actor = self._starting.pop(ref).actor
        try:
            self.pids[actor] = ray.get(ref)
        except RayTaskError as error:
            raise unwrapped(error) from None
        except RayError as error:
            self._false_starts += 1
            if self._false_starts == TRIES:
                raise ClusterError(
                    f"{TRIES} client actors died while they started; the last one said: {error}"
                ) from error
            self._start()
        else:
            self._false_starts = 0
            self._idle.append(actor)

    def _late(self) -> str:
        size = self.placement
        return (
            f"{len(self.pids)} of {self.num_workers} client actors (num_cpus={size.num_cpus:g}, "
            f"num_gpus={size.num_gpus:g} each) were ready within runtime.start_timeout_s={size.start_timeout_s:g}; "
            "other work may hold the cluster's resources: ask for fewer actors or raise runtime.start_timeout_s"
        )


def readable(error: RayTaskError, kind: str, shared: Ref, job: Job) -> BaseException:
    """An error raised in an actor, with its round: ClientError, or ClusterError if an input of the call was lost."""
    cause = unwrapped(error)
    if isinstance(cause, ClientError):
        return cause
    kind_of_error = ClusterError if isinstance(cause, RayError) else ClientError
    wrapped = kind_of_error(f"{whereabouts(kind, shared, job)}: {type(cause).__name__}: {cause}")
    wrapped.add_note(str(error))
    return wrapped


def lost(error: RayError, kind: str, shared: Ref, job: Job) -> ClientError:
    """The end of a call that lost its actor too often."""
    return ClientError(
        f"{whereabouts(kind, shared, job)}: the actor died in {TRIES} tries; if memory ran out, ask for fewer actors "
        f"or a smaller runtime.chunk_size. The last time Ray said: {' '.join(str(error).split())}"
    )


def whereabouts(kind: str, shared: Ref, job: Job) -> str:
    """Round, step and clients of a job, for an error."""
    about: Shared = ray.get(shared)
    clients = getattr(job.work, "clients", None) or tuple(getattr(job.work, "rows", ()))
    ids = [client[0] if isinstance(client, tuple) else client for client in clients]
    of = f", clients {ids[0]} to {ids[-1]}" if ids else ""
    return f"round {about.round}, {kind}{of}"
