"""RayExecutor does jobs on a pool of client actors. If an actor dies or runs out of memory, its call is sent again.

A job goes to any free actor, with one call in flight per actor. The coordinator owns the objects that a call returns,
so the death of an actor loses only the call on which it was working.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import ray
import torch
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError

from actors.client import Actor
from actors.errors import Cause, ClusterError, Failure, LostObjects, try_again, unwrapped
from actors.object_store import (
    Packed,
    Stored,
    ValueRef,
    WaitingJobs,
    bytes_by_node,
    homes,
    inputs,
    objects,
    references,
    value,
)
from actors.placement import Machines, Placement
from actors.pool import PING_S, ActorPool
from rayfl import tree
from rayfl.compress.base import Packet
from rayfl.determinism.addition_order import runs
from rayfl.determinism.platform import Platform
from rayfl.errors import ClientError, HookError, OutOfMemory, out_of_memory
from rayfl.gather import Handle
from rayfl.rounds.executor import Job, JobResult, OnWave, Ref, Wave
from rayfl.rounds.resources import Meter, Use
from rayfl.rounds.worker_jobs import OBJECT_BYTES, RewriteJob, RoundInputs
from rayfl.run_directory.disk import portions
from rayfl.settings import read_here

MOST_THIN = 64
"""If more objects than this are at most half in use, their values are packed anew; fewer of them waste little."""

MOST_SMALL = 10_000
"""If there are more objects with states than this, an object that could hold twice its values counts as half used."""


@dataclass(frozen=True)
class StoredPacket:
    """A packet in the object store."""

    ref: ray.ObjectRef

    def open(self) -> Packet:
        """Read the packet, without a copy if it is on this node."""
        return ray.get(self.ref)


@dataclass(frozen=True)
class Call:
    """A job that an actor is doing."""

    index: int
    actor: Actor
    objects: list[ray.ObjectRef]
    deadline: float


@dataclass
class PendingCalls:
    """The jobs of one `run`: waiting, sent, done or failed.

    `homes`: the home of each job; () if none has one.
    """

    shared: Ref
    jobs: Sequence[Job]
    homes: Sequence[str | None] = ()
    waiting: WaitingJobs = field(init=False)
    losses: Counter[tuple[int, Cause]] = field(default_factory=Counter)
    done: dict[int, JobResult] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    sent: dict[ray.ObjectRef, Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = WaitingJobs(self.homes or [None] * len(self.jobs))

    def fail(self, index: int, error: BaseException) -> None:
        """Note a job's error. No later job is sent, because a single worker would not have reached it."""
        self.failed[index] = error
        self.waiting.keep_before(min(self.failed))

    @property
    def wave(self) -> Wave:
        """The progress of the jobs."""
        return Wave.of(self.jobs, [self.jobs[index] for index in self.done])

    def about(self, call: Call) -> str:
        """The round, step and clients of a call, for a sentence."""
        about: RoundInputs = ray.get(self.shared)
        job = self.jobs[call.index]
        clients = getattr(job.work, "clients", ())
        about_clients = f", clients {clients[0]} to {clients[-1]}" if clients else ""
        return f"round {about.round}, {job.kind}{about_clients}"

    def readable(self, call: Call, error: RayTaskError) -> BaseException:
        """The error that a call raised: HookError; or, with its round, ClientError or (a lost input) ClusterError."""
        cause = unwrapped(error)
        if isinstance(cause, ClientError | HookError):
            return cause
        of_ray = LostObjects if isinstance(cause, ObjectLostError) else ClusterError
        kind_of_error = of_ray if isinstance(cause, RayError) else ClientError
        wrapped = kind_of_error(f"{self.about(call)}: {type(cause).__name__}: {cause}")
        wrapped.add_note(str(error))
        return wrapped


class RayExecutor:
    """The `Executor` of rayfl on Ray actors. `close` ends the actors."""

    def __init__(
        self,
        setup: ray.ObjectRef,
        placement: Placement,
        machines: Machines | None = None,
        on_platform: Callable[[Platform], None] = lambda platform: None,
        on_wave: OnWave = lambda wave: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the actors; arguments and errors are those of `ActorPool`. `on_wave` is called after every call."""
        self._on_wave = on_wave
        self.stored = WeakSet[Stored]()
        """The objects with states of clients, or the server's memories of them."""
        self._look_at: float = MOST_THIN
        self._together = 1
        self._meter, self._used = Meter(torch.device("cpu")), dict[tuple[str, int], Use]()
        self.pool = ActorPool(setup, placement, machines, on_platform, stopping)

    def put(self, value: Any) -> Ref:
        """Put a value into the object store."""
        return ray.put(value)

    def put_all(self, values: Iterable[Any]) -> list[Ref]:
        """Put values into the object store, small ones together."""
        refs: list[Ref] = []
        for group in portions(({str(at): state} for at, state in enumerate(values)), tree.num_bytes, OBJECT_BYTES):
            # References to packets lie in no shared object.
            alone = any(isinstance(leaf, StoredPacket) for leaf in tree.flatten(group).values())
            for some in [[state] for state in group.values()] if alone else [[*group.values()]]:
                stored = Stored(ray.put(Packed(some) if len(some) > 1 else some[0]), len(some))
                self.stored.add(stored)
                refs += [ValueRef(stored, index) for index in range(len(some))]
        return refs

    def get(self, ref: Ref) -> Any:
        """Get a value from the object store; large arrays are read-only views of it."""
        return value(ray.get(ref.stored.ref), ref.index) if isinstance(ref, ValueRef) else ray.get(ref)

    def handle(self, ref: Ref) -> Handle:
        """A packet's reference, which any worker can open."""
        return StoredPacket(ref)

    @property
    def pids(self) -> list[int]:
        """The processes of the actors that are ready."""
        return [joined.pid for joined in self.pool.ready.values()]

    def settings_read(self) -> frozenset[tuple[str, str]] | None:
        """The settings that code has read in this process and in all actors; None if an actor has died."""
        try:
            return read_here().union(*ray.get([actor.settings_read.remote() for actor in self.pool.ready]))
        except RayError:
            return None

    def used(self) -> list[Use]:
        """What this process and the actors have used; of an actor that does not answer, what it last said."""
        asked = {actor.used.remote(): (joined.node, joined.pid) for actor, joined in self.pool.ready.items()}
        for ref in ray.wait([*asked], num_returns=len(asked), timeout=PING_S)[0] if asked else ():
            with suppress(RayError):
                self._used[asked[ref]] = ray.get(ref)
        return [self._meter.read(), *self._used.values()]

    @property
    def num_workers(self) -> int:
        """The number of actors that are ready."""
        return max(1, len(self.pids))

    def close(self) -> None:
        """End all actors."""
        self.pool.close()

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs.

        Raise ClientError if a client's own code fails, or if a call loses its actor too often; LostObjects if a job's
        inputs or outputs were lost with a node; Stopped if the run is to stop and no actor is left. After an error no
        later job is sent. If several jobs fail, the error of the first of them is raised, as with a single worker.
        """
        self.pool.grow()
        self._tidy(shared)
        pending = self._pending(shared, jobs)
        self._on_wave(pending.wave)
        while pending.sent or pending.waiting:
            self.pool.leave()
            while pending.waiting and self.pool.idle:
                self._send(pending)
            first = min((call.deadline for call in pending.sent.values()), default=math.inf)
            for ref in self.pool.wait(list(pending.sent), min(first, self.pool.leaving.next_look)):
                self._take(pending, ref)
            for ref in [ref for ref, call in pending.sent.items() if call.deadline <= time.monotonic()]:
                reason = f"no answer in call_timeout_s={self.pool.placement.call_timeout_s:g}"
                self._replace_and_send_again(pending, pending.sent.pop(ref), reason, "time")
        self.pool.admit_ready()
        if pending.failed:
            raise pending.failed[min(pending.failed)]
        return [pending.done[index] for index in range(len(jobs))]

    def _tidy(self, shared: Ref) -> None:
        """If there are a quarter more objects than at the last look, pack those at most half in use anew."""
        if len(self.stored) > self._look_at:
            thin = [
                stored
                for stored in self.stored
                if 2 * len(stored.parts) <= (self._together if len(self.stored) > MOST_SMALL else stored.size)
            ]
            # `rewrite` calls `run`, which must not tidy again.
            self._look_at = math.inf
            try:
                if len(thin) > MOST_THIN:
                    self.rewrite(shared, thin)
            finally:
                del thin
                self._look_at = max(MOST_THIN, 5 * len(self.stored) // 4)

    def rewrite(self, shared: Ref, stored: Sequence[Stored]) -> None:
        """Store the values of these objects anew, by calls of their own. The references to them stay as they are."""
        num_bytes = bytes_by_node([Job(None, tuple(shared_object.parts)) for shared_object in stored])
        order = sorted(range(len(stored)), key=lambda at: [*num_bytes[at]])
        parts = [part for at in order for part in sorted(stored[at].parts, key=lambda part: part.index)]
        jobs = []
        for span in runs(range(len(parts)), self.num_workers):
            moved = tuple(parts[span[0] : span[-1] + 1])
            jobs.append(Job(RewriteJob(), moved, len(moved), (range(len(moved)),), self._together))
        for job, job_result in zip(jobs, self.run(shared, jobs), strict=True):
            for part, new in zip(job.inputs, job_result.outputs, strict=True):
                part.move(new)

    def _pending(self, shared: Ref, jobs: Sequence[Job]) -> PendingCalls:
        """The calls that the jobs need. If the actors are on several nodes, each job has a home node."""
        nodes = sorted(joined.node for joined in self.pool.ready.values())
        return PendingCalls(shared, jobs, homes(bytes_by_node(jobs), nodes) if len({*nodes}) > 1 else ())

    def _next_pair(self, waiting: WaitingJobs) -> tuple[int, Actor]:
        """A waiting job and an idle actor, on the job's home node if there is such a pair."""
        ready = self.pool.ready
        at_home = (at for at, actor in enumerate(self.pool.idle) if waiting.at_home(ready[actor].node))
        position = 0 if waiting.homeless else next(at_home, 0)
        actor = self.pool.idle[position]
        del self.pool.idle[position]
        return waiting.take(ready[actor].node), actor

    def _send(self, pending: PendingCalls) -> None:
        index, actor = self._next_pair(pending.waiting)
        limit = self.pool.placement.call_timeout_s
        job = pending.jobs[index]
        (refs, places), together = inputs(job.inputs), objects(job)
        returned = actor.call.options(num_returns=1 + len(together)).remote(
            together, pending.shared, job.work, places, *refs
        )
        *objects_made, result = returned if together else [returned]
        pending.sent[result] = Call(
            index, actor, objects_made, time.monotonic() + (math.inf if limit is None else limit)
        )

    def _take(self, pending: PendingCalls, ref: ray.ObjectRef) -> None:
        """Take the result of a call that is over, or its error; if the call lost its actor, send it again."""
        call = pending.sent.pop(ref)
        try:
            outputs = references(pending.jobs[call.index], call.objects)
            pending.done[call.index] = JobResult(ray.get(ref), outputs)
            self.stored |= {output.stored for output in outputs if isinstance(output, ValueRef)}
            self._together = max(self._together, pending.jobs[call.index].together)
            self._on_wave(pending.wave)
        except RayTaskError as error:
            cause = unwrapped(error)
            if out_of_memory(cause):
                about = "" if isinstance(cause, OutOfMemory) else f"{pending.about(call)}: out of memory: "
                self._replace_and_send_again(pending, call, f"{about}{cause}", "memory")
                return
            pending.fail(call.index, pending.readable(call, error))
        except ObjectLostError as error:
            pending.fail(call.index, LostObjects(f"{pending.about(call)}: {error}"))
        except OutOfMemoryError:
            reason = f"{pending.about(call)}: out of memory, so that Ray's memory monitor killed the actor"
            self._replace_and_send_again(pending, call, reason, "memory")
            return
        except RayError as error:
            self._replace_and_send_again(pending, call, " ".join(str(error).split()), "death")
            return
        self.pool.idle.append(call.actor)

    def _replace_and_send_again(self, pending: PendingCalls, call: Call, reason: str, cause: Cause) -> None:
        """Replace a call's actor. Send the call again, unless an earlier job has failed or this was its last try.

        A loss that was announced does not count.
        """
        pending.losses[call.index, cause] += not self.pool.is_leaving(call.actor)
        pid = self.pool.replace(call.actor)
        loss = Failure(cause, pending.losses[call.index, cause], reason, pending.about(call), pid)
        try:
            try_again(loss, ClientError)
        except ClientError as error:
            pending.fail(call.index, error)
        else:
            if call.index < min(pending.failed, default=len(pending.jobs)):
                pending.waiting.put_back(call.index)
