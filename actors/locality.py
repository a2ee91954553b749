"""Locality: a free actor takes a job whose inputs are on its node; if there is none, any other job. No actor waits.

A client's state is stored on the node where its last call ran. The coordinator owns the state, so it knows that node.
Objects below Ray's limit for the object store are in the coordinator itself and count for no node.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ray import ObjectRef
from ray.experimental import get_local_object_locations

from rayfl.rounds.executor import Job


@dataclass(frozen=True)
class Inputs:
    """The bytes of a job's inputs in object stores: the sum, and by node id."""

    num_bytes: int = 0
    by_node: Mapping[str, int] = field(default_factory=dict)

    def home(self, nodes: Collection[str]) -> str | None:
        """The one of these nodes with the most bytes; None if they have none."""
        here = {node: found for node, found in self.by_node.items() if node in nodes}
        return max(here, key=lambda node: (here[node], node)) if here else None

    def elsewhere(self, node: str) -> int:
        """The bytes that other nodes must send to this one for the job."""
        return self.num_bytes - self.by_node.get(node, 0)


def inputs_of(jobs: Sequence[Job]) -> list[Inputs]:
    """Look up where each job's inputs are stored. This process must own them."""
    refs = {ref for job in jobs for ref in job.inputs if isinstance(ref, ObjectRef)}
    places = get_local_object_locations(list(refs)) if refs else {}
    found = []
    for job in jobs:
        here = [place for ref in job.inputs if (place := places.get(ref)) and place["node_ids"]]
        by_node: Counter[str] = Counter()
        for place in here:
            by_node.update(dict.fromkeys(place["node_ids"], place["object_size"]))
        found.append(Inputs(sum(place["object_size"] for place in here), by_node))
    return found


def homes(inputs: Sequence[Inputs], nodes: Sequence[str]) -> list[str | None]:
    """The home of each job, from its inputs and the sorted nodes of all actors.

    Jobs without inputs in object stores are spread evenly, consecutive ones to one node, so that sums of clients which
    are added first lie on one node.
    """
    even = [nodes[index * len(nodes) // len(inputs)] if nodes else None for index in range(len(inputs))]
    return [one.home(nodes) or other for one, other in zip(inputs, even, strict=True)]


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
