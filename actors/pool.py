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
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError

from actors.client import Actor, ClientActor, Joined
from actors.errors import ClusterError, LostObjects, unwrapped
from actors.kinds import Kinds
from actors.locality import WaitingJobs, inputs_of
from actors.losses import Cause, Loss, decide
from actors.pending import Call, PendingCalls
from actors.placement import Placement, nodes, packed
from actors.sentences import readable
from actors.setups import FilesMissing, put_whole
from rayfl.compress.base import Packet
from rayfl.determinism.platform import Platform
from rayfl.experiment.experiment import NODE_KEY
from rayfl.gather import Handle
from rayfl.rounds.errors import ClientError, OutOfMemory, out_of_memory
from rayfl.rounds.executor import Job, JobResult, OnWave, Ref

log = logging.getLogger("rayfl")

PING_S = 5.0
"""Seconds in which an idle actor must answer. One that is late stays, and its next call shows whether it lives."""

GROWTH_S = 5.0
"""Seconds between looks for nodes that have joined."""


@dataclass(frozen=True)
class StoredPacket:
    """A packet in the object store."""

    ref: ObjectRef

    def open(self) -> Packet:
        """Read the packet, without a copy where it lies on this node."""
        return ray.get(self.ref)


@dataclass(frozen=True)
class Starting:
    """An actor that is starting; `node`: where it is meant to, by the node's id, "" for anywhere."""

    actor: Actor
    deadline: float
    node: str = ""


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
        """Start the actors. ClusterError if none is ready in time; RayflError for what they cannot do.

        `kinds` decides which machines work; `on_platform` is called with their description, whenever it is another;
        `on_loss` with why an actor was lost; `on_wave` whenever a call has come back.
        """
        self.placement = placement
        self._kinds = kinds or Kinds({}, placement.mixed)
        self._on_platform, self._on_loss, self._on_wave = on_platform, on_loss, on_wave
        self._odd_nodes: set[str] = set()
        self._joined: dict[Actor, Joined] = {}
        self.pids: dict[Actor, int] = {}
        self._node_of: dict[Actor, str] = {}
        self.moved_bytes = 0
        """Bytes of inputs that lay on other nodes than the actors which they were sent to."""
        self._setup, self._whole_setup = setup, None
        self._idle: deque[Actor] = deque()
        self._starting: dict[ObjectRef, Starting] = {}
        self._false_starts = 0
        self._opening, self._next_look = True, time.monotonic() + GROWTH_S
        # Of those that have no room yet, only the first is waited for.
        awaited = placement.num_actors if placement.most is None else max(1, min(placement.num_actors, self._room()))
        self._start(placement.num_actors)
        try:
            while not self.pids:
                while self._starting and len(self.pids) < awaited and not self._late:
                    self._wait([])
                if self._starting and len(self.pids) < awaited:
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

    @property
    def num_workers(self) -> int:
        """The actors that are ready."""
        return max(1, len(self.pids))

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs. ClientError where a client's own code fails, or where a call loses its actor again and again.

        After an error no later job is sent, and of several errors the one of the first job is raised: a single worker
        would have met that one. LostObjects where a job's inputs or outputs were lost with a node.
        """
        self._grow()
        pending = self._pending(shared, jobs)
        self._on_wave(pending.wave)
        while pending.flying or pending.waiting:
            while pending.waiting and self._idle:
                self._send(pending)
            for ref in self._wait(list(pending.flying), pending.deadline):
                self._take(pending, ref)
            for ref in pending.late():
                reason = f"no answer in call_timeout_s={self.placement.call_timeout_s:g}"
                self._lose(pending, pending.flying.pop(ref), reason, "time")
        self._welcome_ready()
        if pending.failed:
            raise pending.failed[min(pending.failed)]
        return [pending.done[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.pids, *(starting.actor for starting in self._starting.values())]:
            ray.kill(actor)
        self.pids.clear()
        self._node_of.clear()
        self._starting.clear()
        self._idle.clear()

    def _grow(self) -> None:
        """Ask for more actors where nodes have joined, up to the number asked for, and take in those that are ready."""
        most = self.placement.most
        if most is not None and self._next_look <= time.monotonic():
            self._next_look = time.monotonic() + GROWTH_S
            wanted = min(most, max(self._room(), self.placement.num_actors))
            more = wanted - len(self.pids) - len(self._starting)
            if more > 0:
                log.info(f"the cluster has grown: {more} more client actors start")
                self._start(more)
        self._welcome_ready()

    def _room(self) -> int:
        return sum(self.placement.room(nodes(), self._odd_nodes).values())

    def _pending(self, shared: Ref, jobs: Sequence[Job]) -> PendingCalls:
        """The jobs, which have homes where actors are on several nodes."""
        here = set(self._node_of.values())
        return PendingCalls(shared, jobs, inputs_of(jobs) if len(here) > 1 else (), here)

    def _next_pair(self, waiting: WaitingJobs) -> tuple[int, Actor]:
        """A job that waits and an idle actor, which is on the job's own node where any such pair is left."""
        place = 0
        if not waiting.homeless:
            local = (at for at, actor in enumerate(self._idle) if waiting.at_home(self._node_of[actor]))
            place = next(local, 0)
        actor = self._idle[place]
        del self._idle[place]
        return waiting.take(self._node_of[actor]), actor

    def _send(self, pending: PendingCalls) -> None:
        index, actor = self._next_pair(pending.waiting)
        limit, job = self.placement.call_timeout_s, pending.jobs[index]
        self.moved_bytes += pending.inputs[index].elsewhere(self._node_of[actor])
        method = actor.call.options(num_returns=1 + job.num_outputs)
        answer = method.remote(job.num_outputs, pending.shared, job.work, *job.inputs)
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
            pending.fail(call.index, readable(error, pending.shared, pending.jobs[call.index]))
        except ObjectLostError as error:
            pending.fail(call.index, LostObjects(f"{pending.about(call)}: {error}"))
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
        pid = self._forget(call.actor)
        self._on_loss(cause)
        ray.kill(call.actor)
        self._start()
        self._drop_dead()
        pending.losses[call.index, cause] += 1
        decision = decide(Loss(cause, pending.losses[call.index, cause], reason, pending.about(call), pid))
        if decision.again:
            pending.send_again(call.index)
            log.warning(decision.sentence)
        else:
            pending.fail(call.index, ClientError(decision.sentence))

    def _forget(self, actor: Actor) -> int | None:
        """Count an actor among the ready ones no more; its process, if it was one of them."""
        self._node_of.pop(actor, None)
        return self.pids.pop(actor, None)

    def _drop_dead(self) -> None:
        """Replace dead idle actors too: a node that is lost takes all of its actors along, and no call is to blame."""
        calls = {actor.ping.remote(): actor for actor in self._idle}
        answered, _ = ray.wait([*calls], num_returns=len(calls), timeout=PING_S) if calls else ([], [])
        for ref in answered:
            try:
                ray.get(ref)
            except RayError:
                self._idle.remove(calls[ref])
                self._forget(calls[ref])
                self._on_loss("death")
                self._start()

    def _start(self, count: int = 1) -> None:
        size = self.placement
        labels = dict(size.labels)
        if self._odd_nodes:
            labels[NODE_KEY] = f"!in({','.join(sorted(self._odd_nodes))})"
        packs = size.strategy == "pack"
        room = size.room(nodes(), self._odd_nodes) if packs else {}
        there = Counter([*self._node_of.values(), *(starting.node for starting in self._starting.values())])
        for _ in range(count):
            node = packed(room, there)
            there[node] += 1
            options = {
                "num_cpus": size.num_cpus,
                "num_gpus": size.num_gpus,
                "scheduling_strategy": "DEFAULT" if packs else "SPREAD",
                "label_selector": {**labels, NODE_KEY: node} if node else labels,
                # Other work may hold the node's resources.
                "fallback_strategy": [{"label_selector": labels}] if node else None,
            }
            actor = ClientActor.options(**options).remote(size.instruction_set, size.num_gpus)
            joined = actor.join.remote([self._setup])
            self._starting[joined] = Starting(actor, time.monotonic() + size.start_timeout_s, node)

    def _welcome_ready(self) -> None:
        """Take in the new actors that are ready, and wait for none."""
        if self._starting and self.pids:
            self._wait([], deadline=0.0)

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
                if not self._room():
                    advice = "no node has room for one: start workers, or wait longer for an autoscaler's; raise"
                raise ClusterError(f"{self._ready()}; {advice} runtime.start_timeout_s")
            return []
        also_ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in [ref for ref in also_ready if ref in self._starting]:
            self._welcome(ref)
        return [ref for ref in also_ready if ref in calls]

    def _welcome(self, ref: ObjectRef) -> None:
        """Add a new actor to the pool, or start another one if it died as it started.

        One whose node lacks the data's files tries again with the data themselves, which Ray sends once a node.
        """
        starting = self._starting.pop(ref)
        actor = starting.actor
        try:
            joined: Joined = ray.get(ref)
        except RayError as error:
            if isinstance(error, RayTaskError) and not out_of_memory(cause := unwrapped(error)):
                if not isinstance(cause, FilesMissing):
                    raise cause from None
                if self._whole_setup is None:
                    log.info(f"{cause}: the data are sent to such nodes, once")
                    self._whole_setup = put_whole(self._setup)
                self._starting[actor.join.remote([self._whole_setup])] = starting
                return
            self._false_starts += 1
            self._on_loss("start")
            decision = decide(Loss("start", self._false_starts, " ".join(str(error).split())))
            if not decision.again:
                raise ClusterError(decision.sentence) from error
            log.warning(decision.sentence)
            self._start()
        else:
            self.pids[actor], self._joined[actor], self._node_of[actor] = joined.pid, joined, joined.node
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
        self._forget(actor)
        self._odd_nodes.add(joined.node)
        if not self.pids and {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= self._odd_nodes:
            raise ClusterError(self._kinds.none_left())
        if not was_odd or not self.pids:
            self._start()

    @property
    def _late(self) -> bool:
        """Whether some are ready, and the others should have been."""
        return bool(self.pids) and self._start_deadline <= time.monotonic()

    @property
    def _start_deadline(self) -> float:
        """When the last of the new actors must be ready: the earlier ones wait for the same room."""
        return max((starting.deadline for starting in self._starting.values()), default=math.inf)

    def _ready(self) -> str:
        size = self.placement
        return (
            f"{len(self.pids)} of {size.num_actors} client actors ({size.size} each) were ready within "
            f"runtime.start_timeout_s={size.start_timeout_s:g}"
        )
