"""RayExecutor: jobs on a pool of ClientActors. Actors that die or starve are replaced and their calls sent again.

A job goes to any free actor, one call in flight an actor. The caller owns the objects that a call returns, so the
death of an actor loses no more than the call that it was working on. `max_restarts` and `max_task_retries` stay 0: Ray
would send a call to the restarted actor alone, which may wait for room for ever while other actors are free; and it
would run it on a node whose arithmetic has not been checked.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError

from actors.client import Actor, ClientActor, Joined
from actors.errors import ClusterError, LostObjects, unwrapped
from actors.kinds import Kinds
from actors.losses import Cause, Loss, decide
from actors.placement import Placement
from actors.sentences import describe_call, readable
from rayfl.compress.base import Packet
from rayfl.determinism.platform import Platform
from rayfl.gather import Handle
from rayfl.rounds.errors import ClientError, OutOfMemory, out_of_memory
from rayfl.rounds.executor import Job, JobResult, OnWave, Ref, Wave, num_clients

log = logging.getLogger("rayfl")

PING_S = 5.0
"""Seconds in which an idle actor must answer. One that is late stays, and its next call shows whether it lives."""


@dataclass(frozen=True)
class StoredPacket:
    """A packet in the object store."""

    ref: ObjectRef

    def open(self) -> Packet:
        """Read the packet, without a copy where it lies on this node."""
        return ray.get(self.ref)


@dataclass(frozen=True)
class Starting:
    """An actor that is starting."""

    actor: Actor
    deadline: float


@dataclass(frozen=True)
class Call:
    """A job in flight."""

    index: int
    actor: Actor
    outputs: list[ObjectRef]
    deadline: float


@dataclass
class PendingCalls:
    """The jobs of one `run`: waiting, under way, done or failed."""

    kind: str
    shared: Ref
    jobs: Sequence[Job]
    waiting: deque[int] = field(init=False)
    losses: Counter[tuple[int, Cause]] = field(default_factory=Counter)
    done: dict[int, JobResult] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    flying: dict[ObjectRef, Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.jobs)))

    @property
    def deadline(self) -> float:
        """When the first call under way will have taken too long."""
        return min((call.deadline for call in self.flying.values()), default=math.inf)

    @property
    def wave(self) -> Wave:
        """How far they have come."""
        return Wave(self.kind, num_clients([self.jobs[index] for index in self.done]), num_clients(self.jobs))

    def late(self) -> list[ObjectRef]:
        """The calls under way that have taken too long."""
        now = time.monotonic()
        return [ref for ref, call in self.flying.items() if call.deadline <= now]

    def about(self, call: Call) -> str:
        """Round, step and clients of a call."""
        return describe_call(self.kind, self.shared, self.jobs[call.index])


class RayExecutor:
    """The `Executor` of rayfl on Ray actors. `close` ends the actors. Lost actors, and what is done about them, are
    logged."""

    def __init__(
        self,
        setup: ObjectRef,
        placement: Placement,
        kinds: Kinds | None = None,
        on_platform: Callable[[Platform], None] = lambda platform: None,
        on_loss: Callable[[Cause], None] = lambda cause: None,
        on_wave: OnWave = lambda wave: None,
    ) -> None:
        """Start the actors. ClusterError if none is ready in time; SettingsError for what they cannot do.

        `kinds` decides which machines work; `on_platform` is called with their description, whenever it is another;
        `on_loss` with why an actor was lost; `on_wave` whenever a call has come back.
        """
        self.placement, self.num_workers = placement, placement.num_actors
        self._kinds = kinds or Kinds({}, placement.mixed)
        self._on_platform, self._on_loss, self._on_wave = on_platform, on_loss, on_wave
        self._odd_nodes: set[str] = set()
        self._joined: dict[Actor, Joined] = {}
        self.pids: dict[Actor, int] = {}
        self._setup = setup
        self._idle: deque[Actor] = deque()
        self._starting: dict[ObjectRef, Starting] = {}
        self._false_starts = 0
        self._opening = True
        for _ in range(self.num_workers):
            self._start()
        try:
            while not self.pids:
                while self._starting and not (self.pids and self._start_deadline <= time.monotonic()):
                    self._wait([])
                if self._starting:
                    log.warning("%s; going on with these, and with the others when there is room", self._ready())
                self._kinds.lead([joined.platform for joined in self._joined.values()])
                for actor in [*self._joined]:
                    self._judge(actor)
            self._opening = False
            self._on_platform(self._kinds.platform)
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
        return StoredPacket(ref)

    def run(self, kind: str, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs. ClientError where a client's own code fails, or where a call loses its actor again and again.

        After an error no further job is sent. Of several errors the one of the first job is raised: since jobs are sent
        in order, a single worker would have met that one. LostObjects where a job's inputs or outputs were lost with a
        node.
        """
        pending = PendingCalls(kind, shared, jobs)
        self._on_wave(pending.wave)
        while pending.flying or (pending.waiting and not pending.failed):
            while pending.waiting and self._idle and not pending.failed:
                self._send(pending)
            for ref in self._wait(list(pending.flying), pending.deadline):
                self._take(pending, ref)
            for ref in pending.late():
                reason = f"no answer in call_timeout_s={self.placement.call_timeout_s:g}"
                self._lose(pending, pending.flying.pop(ref), reason, "time")
        if pending.failed:
            raise pending.failed[min(pending.failed)]
        return [pending.done[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.pids, *(starting.actor for starting in self._starting.values())]:
            ray.kill(actor)
        self.pids.clear()
        self._starting.clear()
        self._idle.clear()

    def _send(self, pending: PendingCalls) -> None:
        index, actor, limit = pending.waiting.popleft(), self._idle.popleft(), self.placement.call_timeout_s
        job = pending.jobs[index]
        method = actor.call.options(num_returns=1 + job.num_outputs)
        answer = method.remote(pending.kind, job.num_outputs, pending.shared, job.work, *job.inputs)
        *outputs, result = answer if job.num_outputs else [answer]
        pending.flying[result] = Call(index, actor, outputs, time.monotonic() + (math.inf if limit is None else limit))

    def _take(self, pending: PendingCalls, ref: ObjectRef) -> None:
        """Take in the result, the error or the loss of a call that is over."""
        call = pending.flying.pop(ref)
        try:
            pending.done[call.index] = JobResult(ray.get(ref), call.outputs)
            self._on_wave(pending.wave)
        except RayTaskError as error:
            cause = unwrapped(error)
            if out_of_memory(cause):
                where = "" if isinstance(cause, OutOfMemory) else f"{pending.about(call)}: out of memory: "
                self._lose(pending, call, f"{where}{cause}", "memory")
                return
            pending.failed[call.index] = readable(error, pending.kind, pending.shared, pending.jobs[call.index])
        except ObjectLostError as error:
            pending.failed[call.index] = LostObjects(f"{pending.about(call)}: {error}")
        except OutOfMemoryError:
            reason = f"{pending.about(call)}: out of memory, so that Ray's memory monitor killed the actor"
            self._lose(pending, call, reason, "memory")
            return
        except RayError as error:
            self._lose(pending, call, " ".join(str(error).split()), "death")
            return
        self._idle.append(call.actor)

    def _lose(self, pending: PendingCalls, call: Call, reason: str, cause: Cause) -> None:
        """Replace the actor of a call, and send the call again or give up on it.

        The old actor is killed, even if it still works: the call is sent again, and its memory must be freed.
        """
        pid = self.pids.pop(call.actor, None)
        self._on_loss(cause)
        ray.kill(call.actor)
        self._start()
        self._drop_dead()
        pending.losses[call.index, cause] += 1
        decision = decide(Loss(cause, pending.losses[call.index, cause], reason, pending.about(call), pid))
        if decision.again:
            pending.waiting.appendleft(call.index)
            log.warning(decision.sentence)
        else:
            pending.failed[call.index] = ClientError(decision.sentence)

    def _drop_dead(self) -> None:
        """Replace dead idle actors too: a node that is lost takes all of its actors along, and no call is to blame."""
        calls = {actor.ping.remote(): actor for actor in self._idle}
        answered, _ = ray.wait([*calls], num_returns=len(calls), timeout=PING_S) if calls else ([], [])
        for ref in answered:
            try:
                ray.get(ref)
            except RayError:
                self._idle.remove(calls[ref])
                self.pids.pop(calls[ref], None)
                self._on_loss("death")
                self._start()

    def _start(self) -> None:
        size = self.placement
        elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(self._odd_nodes))})"} if self._odd_nodes else None
        options = {"num_cpus": size.num_cpus, "num_gpus": size.num_gpus, "label_selector": elsewhere}
        actor = ClientActor.options(**options).remote(size.instruction_set, size.num_gpus)
        joined = actor.join.remote([self._setup])
        self._starting[joined] = Starting(actor, time.monotonic() + size.start_timeout_s)

    def _wait(self, calls: list[ObjectRef], deadline: float = math.inf) -> list[ObjectRef]:
        """Wait for one of the calls, for a new actor, or until `deadline`; return the calls that are over.

        A new actor without room does not hold the others up: Ray starts it once there is room.
        """
        # Where some live, only calls have deadlines; where none does, new actors have theirs.
        late = self._start_deadline
        until = deadline if self.pids and not self._opening else min(deadline, late)
        refs = [*calls, *self._starting]
        patience = None if until == math.inf else max(0.0, until - time.monotonic())
        ready, _ = ray.wait(refs, num_returns=1, timeout=patience)
        if not ready:
            if late <= time.monotonic() and not self.pids:
                if unlike := self._kinds.none_left():
                    raise ClusterError(unlike)
                advice = "other work may hold the cluster's resources: ask for fewer actors or raise"
                raise ClusterError(f"{self._ready()}; {advice} runtime.start_timeout_s")
            return []
        also_ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in [ref for ref in also_ready if ref in self._starting]:
            self._welcome(ref)
        return [ref for ref in also_ready if ref in calls]

    def _welcome(self, ref: ObjectRef) -> None:
        """Add a new actor to the pool, or start another one if it died as it started."""
        actor = self._starting.pop(ref).actor
        try:
            joined: Joined = ray.get(ref)
        except RayError as error:
            if isinstance(error, RayTaskError) and not out_of_memory(cause := unwrapped(error)):
                raise cause from None
            self._false_starts += 1
            self._on_loss("start")
            decision = decide(Loss("start", self._false_starts, " ".join(str(error).split())))
            if not decision.again:
                raise ClusterError(decision.sentence) from error
            log.warning(decision.sentence)
            self._start()
        else:
            self.pids[actor], self._joined[actor] = joined.pid, joined
            self._false_starts = 0
            self._idle.append(actor)
            if not self._opening:
                before = self._kinds.platform
                self._judge(actor)
                if self._kinds.platform != before:
                    self._on_platform(self._kinds.platform)

    def _judge(self, actor: Actor) -> None:
        """Let a new actor work, or leave its node aside and start another one elsewhere if it computes other bits.

        ClusterError where no node is left.
        """
        joined = self._joined.pop(actor)
        verdict = self._kinds.judge(joined.platform, joined.address)
        was_odd = joined.node in self._odd_nodes
        if verdict.notice and not was_odd:
            log.warning(verdict.notice)
        if verdict.admitted:
            return
        ray.kill(actor)
        self._idle.remove(actor)
        del self.pids[actor]
        self._odd_nodes.add(joined.node)
        if not self.pids and {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= self._odd_nodes:
            raise ClusterError(self._kinds.none_left())
        if not was_odd or not self.pids:
            self._start()

    @property
    def _start_deadline(self) -> float:
        """When the last of the new actors must be ready: the earlier ones wait for the same room."""
        return max((starting.deadline for starting in self._starting.values()), default=math.inf)

    def _ready(self) -> str:
        size = self.placement
        return (
            f"{len(self.pids)} of {self.num_workers} client actors (num_cpus={size.num_cpus:g}, "
            f"num_gpus={size.num_gpus:g} each) were ready within runtime.start_timeout_s={size.start_timeout_s:g}"
        )
