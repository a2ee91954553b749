"""ActorPool: the client actors of a run. It starts them, admits those that are ready, and replaces those that die.

`max_restarts` and `max_task_retries` stay 0. With them, Ray would send a call again to the restarted actor alone, which
may wait for room for ever while other actors are free, and might run it on a node that computes other bits.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import ray_internals
from actors.client import Actor, ClientActor, Joined
from actors.errors import ClusterError, Failure, try_again, unwrapped
from actors.placement import Machines, Placement, living_nodes
from rayfl.determinism.platform import Platform
from rayfl.errors import log, out_of_memory
from rayfl.experiment.runtime import NODE_KEY
from rayfl.run_directory.play_run import Stopped

PING_S = 5.0
"""Seconds in which an idle actor must answer. A late one stays in the pool; its next call shows whether it lives."""

GROWTH_S = 5.0
"""Seconds between looks for nodes that have joined."""

LOOK_S = 1.0
"""Seconds between looks whether a run that waits for room is to stop, and for announcements, each of 0.3 ms."""

LINE_S = 60.0
"""Seconds between lines of a run that waits for room."""


@ray.remote(num_cpus=0)
def _copied(objects: list[ray.ObjectRef]) -> None:
    """Have Ray copy objects to the node of this task."""
    ray.wait(objects, num_returns=len(objects))


class LeavingNodes:
    """Nodes of a joined cluster whose end is announced, as a cloud does before it takes a spot node away.

    Ray drains such a node: it starts nothing there any more. The objects there would be lost with it, among them states
    of clients. So they are copied to other nodes, in time for the announced end. When the node ends, Ray takes the
    copies in their place, under the same references (its documentation: object fault tolerance).

    `announced`: the ids of all nodes so far whose end was announced. `own`: whether this process is on one of them.
    `next_look`: when to look again, by time.monotonic().
    """

    def __init__(self, looks: bool) -> None:
        """looks: whether nodes can leave; if not, it never looks for announcements."""
        self.announced: set[str] = set()
        self.own = False
        self.next_look = 0.0 if looks else math.inf
        self._copying: list[ray.ObjectRef] = []

    def look(self, ready: Mapping[Actor, Joined]) -> None:
        """Look for announcements, at most once in LOOK_S.

        Log those of this process's node and of nodes with actors of `ready`. Copy objects from all announced nodes to
        other nodes.
        """
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_S
        ends = ray_internals.draining_nodes()
        if not ends:
            return
        here = ray.get_runtime_context().get_node_id()
        used = {joined.node: joined.address for joined in ready.values()}
        known = {here: ray.util.get_node_ip_address(), **used}
        for node in ends.keys() & known.keys() - self.announced:
            within = f"in {max(0.0, ends[node] / 1000 - time.time()):.0f} s" if ends[node] else "at any time"
            log.warning(
                f"node {known[node]} ({node[:8]}) will end {within}, as Ray was told (it drains the node): no more "
                "calls go there, its actors start elsewhere, and what clients keep there is copied to other nodes"
                + "; the coordinator is there, so a checkpoint is saved after every round, unless checkpoint.every=0"
                * (node == here)
            )
        self.announced |= ends.keys()
        self.own = here in self.announced
        self._copy(sorted(used.keys() - self.announced) or [here])

    def _copy(self, nodes: list[str]) -> None:
        """Begin to copy the objects that lie on announced nodes alone, unless earlier ones are still being copied."""
        if self._copying and ray.wait(self._copying, num_returns=len(self._copying), timeout=0)[1]:
            return
        objects = ray_internals.known_objects()
        locations = get_local_object_locations(objects)
        lying = {ref: set(locations[ref]["node_ids"]) for ref in objects if ref in locations}
        alone = [ref for ref, holders in lying.items() if holders and holders <= self.announced]
        self._copying = [
            _copied.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote(part)
            for index, node in enumerate(nodes)
            if (part := alone[index :: len(nodes)])
        ]


class ActorPool:
    """The client actors: `ready` has those that can work, `idle` those of them that do nothing.

    Losses, and the decisions about them, are logged.
    """

    def __init__(
        self,
        setup: ray.ObjectRef,
        placement: Placement,
        machines: Machines | None,
        on_platform: Callable[[Platform], None],
        stopping: Callable[[], bool],
    ) -> None:
        """Start the actors.

        Raise ClusterError if none is ready in time, RayflError if they cannot work. `machines` decides which machines
        work; `on_platform` is called with their description whenever it changes. `stopping`: asked while no actor is
        ready, and until all have started; if it returns true, `Stopped` is raised.
        """
        self.placement = placement
        self.ready: dict[Actor, Joined] = {}
        self.idle: deque[Actor] = deque()
        self._machines = machines or Machines({}, placement.mixed)
        self._on_platform = on_platform
        self._stopping = stopping
        self.leaving = LeavingNodes(placement.most is not None)
        self._odd_nodes: set[str] = set()
        self._setup = setup
        self._starting: dict[ray.ObjectRef, Actor] = {}
        self._start_deadline = math.inf
        """When the actor that was started last must be ready: the earlier ones wait for the same room."""
        self._false_starts = 0
        self._opening = True
        self._next_look = time.monotonic() + GROWTH_S
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Start the actors. Wait until all that have room are ready, or until some are ready and the others late."""
        size = self.placement
        self.leave()
        awaited = size.num_actors if size.most is None else max(1, min(size.num_actors, self._room()))
        self.start(size.num_actors)
        while not self.ready:
            while (
                self._starting
                and len(self.ready) < awaited
                and not (self.ready and self._start_deadline <= time.monotonic())
            ):
                self.wait([])
            if self._starting and len(self.ready) < awaited:
                ready = self._progress("runtime.start_timeout_s", size.start_timeout_s)
                log.warning("%s; the run starts with these, and the others join when there is room", ready)
            self._machines.lead([joined.platform for joined in self.ready.values()])
            for actor in [*self.ready]:
                self._admit_machine(actor)
        self._opening = False
        self._on_platform(self._machines.platform)

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.ready, *self._starting.values()]:
            ray.kill(actor)
        self.ready.clear()
        self._starting.clear()
        self.idle.clear()

    def grow(self) -> None:
        """Start more actors if nodes have joined, up to the number asked for, and admit those that are ready."""
        most = self.placement.most
        if most is not None and self._next_look <= time.monotonic():
            self._next_look = time.monotonic() + GROWTH_S
            more = min(most, max(self._room(), self.placement.num_actors)) - len(self.ready) - len(self._starting)
            if more > 0:
                log.info(f"the cluster has grown: client actors that start now: {more}")
                self.start(more)
        self.admit_ready()

    def admit_ready(self) -> None:
        """Admit the new actors that are ready, without waiting."""
        if self._starting and self.ready:
            self.wait([], deadline=0.0)

    def leave(self) -> None:
        """Give up the nodes that are announced to end: end their idle actors, and start others elsewhere."""
        self.leaving.look(self.ready)
        for actor in [actor for actor in self.idle if self.leaving.announced and self.is_leaving(actor)]:
            self._end_idle(actor)
            self.start()

    def is_leaving(self, actor: Actor) -> bool:
        """Whether the node of an actor that is ready is announced to end."""
        return actor in self.ready and self.ready[actor].node in self.leaving.announced

    def start(self, count: int = 1) -> None:
        """Begin to start actors."""
        size = self.placement
        labels = dict(size.labels)
        if without := self._odd_nodes | self.leaving.announced:
            labels[NODE_KEY] = f"!in({','.join(sorted(without))})"
        now = time.monotonic()
        self._next_line, self._start_deadline = now + LINE_S, now + size.start_timeout_s
        for _ in range(count):
            actor = ClientActor.options(
                num_cpus=size.num_cpus, num_gpus=size.num_gpus, scheduling_strategy="SPREAD", label_selector=labels
            ).remote(size.num_gpus)
            self._starting[actor.join.remote([self._setup])] = actor

    def replace(self, actor: Actor) -> int | None:
        """Kill an actor that was at work and start another one.

        Return the killed actor's process id, or None if the actor was not ready. The actor is killed even if it still
        works: its call is sent again, and its memory must be freed.
        """
        joined = self.ready.pop(actor, None)
        ray.kill(actor)
        self.start()
        self._replace_dead()
        return joined.pid if joined else None

    def _replace_dead(self) -> None:
        """Replace dead idle actors too: a lost node takes all its actors along, and no call is to blame."""
        calls = {actor.ping.remote(): actor for actor in self.idle}
        answered, _ = ray.wait([*calls], num_returns=len(calls), timeout=PING_S) if calls else ([], [])
        for ref in answered:
            try:
                ray.get(ref)
            except RayError:
                self._end_idle(calls[ref])
                self.start()

    def _end_idle(self, actor: Actor) -> None:
        """End an idle actor, and take it out of the pool."""
        ray.kill(actor)
        self.idle.remove(actor)
        del self.ready[actor]

    def wait(self, calls: list[ray.ObjectRef], deadline: float = math.inf) -> list[ray.ObjectRef]:
        """Wait for one of the calls, for a new actor, or until `deadline`; return the calls that are over.

        A new actor without room does not delay the others: Ray starts it when there is room.
        """
        looks = self._opening or not self.ready
        until = min(deadline, time.monotonic() + LOOK_S) if looks else deadline
        refs = [*calls, *self._starting]
        patience = None if until == math.inf else max(0.0, until - time.monotonic())
        if not ray.wait(refs, num_returns=1, timeout=patience)[0]:
            if looks:
                self._wait_for_room()
            return []
        over, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in [ref for ref in over if ref in self._starting]:
            self._admit(ref)
        return [ref for ref in over if ref in calls]

    def _wait_for_room(self) -> None:
        """Say once a minute for what a run on a joined cluster waits before it starts, or without any actor.

        Raise ClusterError if no actor was ready in time, Stopped if the run is to stop.
        """
        size = self.placement
        now = time.monotonic()
        if self._stopping():
            raise Stopped
        if not self.ready and now >= self._start_deadline - size.start_timeout_s + size.patience[1]:
            raise ClusterError(self._machines.none_left() or self._no_room())
        if size.wait_for_room_s is not None and now >= self._next_line:
            self._next_line = now + LINE_S
            timeout = f"runtime.start_timeout_s={size.start_timeout_s:g}"
            most = f"at most {timeout}" if self.ready else "or for the first of them"
            log.warning(
                f"waiting for room for client actors, {size.num_actors - len(self.ready)} of {size.size} each, {most}: "
                f"of the cluster's {_in_words(ray.cluster_resources())}, {_in_words(ray.available_resources())} are "
                "free"
            )

    def _admit(self, ref: ray.ObjectRef) -> None:
        """Add a new actor to the pool, or start another one if it died as it started."""
        actor = self._starting.pop(ref)
        try:
            self.ready[actor] = ray.get(ref)
        except RayError as error:
            if isinstance(error, RayTaskError) and not out_of_memory(cause := unwrapped(error)):
                raise cause from None
            self._false_starts += not getattr(error, "preempted", False)
            try_again(Failure("start", self._false_starts, " ".join(str(error).split())))
            self.start()
            return
        self._false_starts = 0
        self.idle.append(actor)
        if not self._opening:
            before = self._machines.platform
            self._admit_machine(actor)
            if self._machines.platform != before:
                self._on_platform(self._machines.platform)

    def _admit_machine(self, actor: Actor) -> None:
        """Let a new actor work; if its node computes other bits, exclude the node and start another actor elsewhere.

        Raise ClusterError if no node is left.
        """
        joined = self.ready[actor]
        verdict = self._machines.admit(joined.platform, joined.address)
        was_odd = joined.node in self._odd_nodes
        if verdict.notice and not was_odd:
            log.warning(verdict.notice)
        if verdict.admitted:
            return
        self._end_idle(actor)
        self._odd_nodes.add(joined.node)
        if not self.ready and {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= self._odd_nodes:
            raise ClusterError(self._machines.none_left())
        if not was_odd or not self.ready:
            self.start()

    def _room(self) -> int:
        """The actors that the cluster's nodes hold."""
        return self.placement.room(living_nodes(), self._odd_nodes | self.leaving.announced)

    def _progress(self, setting: str, seconds: float) -> str:
        size = self.placement
        return (
            f"{len(self.ready)} of {size.num_actors} client actors ({size.size} each) were ready within "
            f"{setting}={seconds:g}"
        )

    def _no_room(self) -> str:
        """The sentence for a run of which no actor was ready in time."""
        advice = "other work may hold the cluster's resources: ask for fewer actors or raise"
        if not self._room():
            advice = "no node has room for one: start more nodes, or, if an autoscaler starts them, raise"
        return f"{self._progress(*self.placement.patience)}; {advice} {self.placement.patience[0]}"


def _in_words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU"))
