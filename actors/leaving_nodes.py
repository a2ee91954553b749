"""LeavingNodes: nodes of a joined cluster whose end is announced, as a cloud does before it takes a spot node away.

Ray drains such a node: it starts nothing there any more. The objects there would be lost with it, among them states of
clients. So they are copied to other nodes, in time for the announced end. When the node ends, Ray takes the copies in
their place, under the same references (its documentation: object fault tolerance).
"""

import math
import time
from collections.abc import Mapping

import ray
from ray.experimental import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import ray_internals
from actors.client import Actor, Joined
from rayfl.errors import log

LOOK_S = 1.0
"""Seconds between looks for announcements. A look takes 0.3 ms."""


@ray.remote(num_cpus=0)
def _copied(objects: list[ray.ObjectRef]) -> None:
    """Have Ray copy objects to the node of this task."""
    ray.wait(objects, num_returns=len(objects))


class LeavingNodes:
    """`announced`: the ids of all nodes so far whose end was announced. `own`: whether this process is on one of them.
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
        places = get_local_object_locations(objects)
        lying = {one: set(places[one]["node_ids"]) for one in objects if one in places}
        alone = [one for one, found in lying.items() if found and found <= self.announced]
        self._copying = [
            _copied.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote(part)
            for place, node in enumerate(nodes)
            if (part := alone[place :: len(nodes)])
        ]
