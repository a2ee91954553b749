"""Which job a free actor takes: one whose inputs lie on its node where there is one, else another. No actor waits.

A client's state lies where its last call ran, and the coordinator, which owns it, knows where without asking anybody.
What is below Ray's limit for the object store lies in the coordinator itself, and counts for no node.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ray import ObjectRef
from ray.experimental import get_local_object_locations

from rayfl.rounds.executor import Job


@dataclass(frozen=True)
class Inputs:
    """The bytes of a job's inputs in object stores: in all, and by the id of the nodes where they lie."""

    num_bytes: int = 0
    by_node: Mapping[str, int] = field(default_factory=dict)

    def home(self, nodes: Collection[str]) -> str | None:
        """Of these nodes the one where most of them lie; None where nothing lies on any."""
        here = {node: found for node, found in self.by_node.items() if node in nodes}
        return max(here, key=lambda node: (here[node], node)) if here else None

    def elsewhere(self, node: str) -> int:
        """The bytes that another node sends to this one for the job."""
        return self.num_bytes - self.by_node.get(node, 0)


def inputs_of(jobs: Sequence[Job]) -> list[Inputs]:
    """Where the inputs of each job lie, as this process, which owns them, has it."""
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


class WaitingJobs:
    """Jobs that wait for an actor, by the node that is the home of their inputs; None: they have none.

    Those of a home are taken in order, and so are all where no job has a home.
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
        """Whether no job that waits has a home."""
        return not any(queue for home, queue in self._queues.items() if home is not None)

    def take(self, node: str) -> int:
        """The job that an actor on this node does next: one at home there, else one without a home, else one of the
        node for which most wait."""
        if self.at_home(node):
            return self._queues[node].popleft()
        if self._queues.get(None):
            return self._queues[None].popleft()
        return max(self._queues.values(), key=len).popleft()

    def put_back(self, index: int) -> None:
        """Let a job wait again, before all others of its home."""
        queue = self._queues[self._homes[index]]
        if index not in queue:
            queue.appendleft(index)

    def keep_before(self, index: int) -> None:
        """Drop the jobs after this one."""
        for home, queue in self._queues.items():
            self._queues[home] = deque(waiting for waiting in queue if waiting < index)
