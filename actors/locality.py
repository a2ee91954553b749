"""Locality: a free actor takes a job whose inputs are on its node; if there is none, any other job. No actor waits.

A client's state is stored on the node where its last call ran. The coordinator owns the state, so it knows that node.
Objects below Ray's limit for the object store are in the coordinator itself and count for no node.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from ray import ObjectRef
from ray.experimental import get_local_object_locations

from actors.shared_objects import inputs
from rayfl.rounds.executor import Job


def bytes_by_node(jobs: Sequence[Job]) -> list[Counter[str]]:
    """The bytes of each job's inputs in object stores, by node id. This process must own them."""
    read = [{ref for ref in inputs(job.inputs)[0] if isinstance(ref, ObjectRef)} for job in jobs]
    refs = set().union(*read)
    places = get_local_object_locations(list(refs)) if refs else {}
    found = [Counter[str]() for _ in jobs]
    for stored, own in zip(found, read, strict=True):
        for place in (places[ref] for ref in own if ref in places):
            stored.update(dict.fromkeys(place["node_ids"], place["object_size"]))
    return found


def homes(stored: Sequence[Mapping[str, int]], nodes: Sequence[str]) -> list[str | None]:
    """The home of each job: of the sorted nodes of all actors, the one with the most bytes of the job's inputs.

    Jobs without inputs in their object stores are spread evenly, consecutive ones to one node, so that sums of clients
    which are added first lie on one node.
    """
    even = [nodes[index * len(nodes) // len(stored)] for index in range(len(stored))]
    return [
        max(one.keys() & nodes, key=lambda node: (one[node], node), default=other)
        for one, other in zip(stored, even, strict=True)
    ]


class WaitingJobs:
    """Jobs that wait for an actor, by their home: the node with most of their inputs, or None.

    The jobs of one home are taken in order.
    """

    def __init__(self, homes: Sequence[str | None]) -> None:
        self._homes = homes
        self._queues: dict[str | None, deque[int]] = {}
        for index, home in enumerate(homes):
            self._queues.setdefault(home, deque()).append(index)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def at_home(self, node: str) -> bool:
        """Whether a job waits whose home is this node."""
        return bool(self._queues.get(node))

    @property
    def homeless(self) -> bool:
        """Whether no waiting job has a home."""
        return not any(queue for home, queue in self._queues.items() if home is not None)

    def take(self, node: str) -> int:
        """Take the next job for an actor on this node: a job at home here, else one without a home, else one of the
        home with the most jobs."""
        if self.at_home(node):
            return self._queues[node].popleft()
        if self._queues.get(None):
            return self._queues[None].popleft()
        return max(self._queues.values(), key=len).popleft()

    def put_back(self, index: int) -> None:
        """Let a job wait again, before the others of its home."""
        queue = self._queues[self._homes[index]]
        if index not in queue:
            queue.appendleft(index)

    def keep_before(self, index: int) -> None:
        """Drop the jobs after this one."""
        for home, queue in self._queues.items():
            self._queues[home] = deque(waiting for waiting in queue if waiting < index)
