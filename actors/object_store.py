"""Objects of Ray's store: several values share one, and jobs are done where their inputs lie.

Every object costs its owner about a kilobyte and some time, so a million clients' states should not be a million
objects. A `ValueRef` is the reference to one value, which is read without the others. It stays the same when the value
moves to another object, for example because most values of its object are no longer used.

A client's state is stored on the node where its last call ran. The coordinator owns the state, so it knows that node,
and a free actor takes a job whose inputs are on its node; if there is none, any other job. No actor waits. Objects
below Ray's limit for the object store are in the coordinator itself and count for no node.
"""

import pickle
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
from ray import ObjectRef, cloudpickle
from ray.experimental import get_local_object_locations

from rayfl.rounds.executor import Job, Ref
from rayfl.tree import ALIGNMENT_BYTES
from rayfl.untyped import Anything


@dataclass(eq=False)
class Stored:
    """An object with `size` values. `parts`: the references to these values that are still in use."""

    ref: ObjectRef
    size: int
    parts: "WeakSet[ValueRef]" = field(default_factory=WeakSet)


@dataclass(eq=False, slots=True, weakref_slot=True)
class ValueRef:
    """A reference to one value of an object."""

    stored: Stored
    index: int

    def __post_init__(self) -> None:
        self.stored.parts.add(self)

    def move(self, new: "ValueRef") -> None:
        """Refer to the value of another reference."""
        self.stored.parts.discard(self)
        self.stored, self.index = new.stored, new.index
        self.stored.parts.add(self)


class Packed:
    """Several values in one buffer. Only the value that is asked for is unpickled; its arrays are views of the buffer.

    Values may hold no references to objects.
    """

    def __init__(self, values: Sequence[Anything]) -> None:
        self.firsts = [0]
        spans = list[tuple[int, int]]()
        pieces = list[bytes | memoryview]()
        first = 0
        for value in values:
            buffers: list[pickle.PickleBuffer] = []
            # Ray's stubs do not name its functions.
            head = cloudpickle.dumps(  # pyright: ignore[reportPrivateImportUsage]
                value, protocol=5, buffer_callback=buffers.append
            )
            for piece in (head, *(buffer.raw() for buffer in buffers)):
                spans.append((first, first + len(piece)))
                pieces += [piece, bytes(-len(piece) % ALIGNMENT_BYTES)]
                first += len(piece) + len(pieces[-1])
            self.firsts.append(len(spans))
        self.spans = np.array(spans)
        self.buffer = np.frombuffer(b"".join(pieces), np.uint8)

    def __getitem__(self, index: int) -> Anything:
        spans = self.spans[self.firsts[index] : self.firsts[index + 1]].tolist()
        head, *buffers = (self.buffer[first:last].data for first, last in spans)
        return pickle.loads(head, buffers=buffers)  # noqa: S301 - an object of this run


def value(content: Anything, index: int) -> Anything:
    """The value of a ValueRef, from the content of its object."""
    return content[index] if isinstance(content, Packed) else content


def objects(job: Job) -> list[Sequence[int]]:
    """The outputs of a job, by position, in each object of its call, in the order in which the objects are complete."""
    kept = [column[at : at + job.together] for column in job.kept for at in range(0, len(column), job.together)]
    return sorted([*kept, *((at,) for at in {*range(job.num_outputs)}.difference(*kept))], key=lambda group: group[-1])


def in_objects(outputs: Iterable[Anything], together: Iterable[Sequence[int]]) -> Iterator[Anything]:
    """Yield the objects of a call as soon as each is complete."""
    left = enumerate(outputs)
    held = dict[int, Anything]()
    for group in together:
        while group[-1] not in held:
            at, held[at] = next(left)
        values = [held.pop(at) for at in group]
        yield Packed(values) if len(values) > 1 else values[0]


def references(job: Job, refs: Iterable[ObjectRef]) -> list[Ref]:
    """A reference to each output of a job from those to its objects: a ValueRef if the output is kept."""
    outputs: dict[int, Ref] = {}
    for group, ref in zip(objects(job), refs, strict=True):
        stored = Stored(ref, len(group)) if any(group[0] in column for column in job.kept) else None
        outputs |= {at: ref if stored is None else ValueRef(stored, index) for index, at in enumerate(group)}
    return [outputs[at] for at in range(job.num_outputs)]


def inputs(refs: Sequence[Ref]) -> tuple[list[Ref], list[tuple[int, int]]]:
    """The distinct objects behind references or None, and for each reference the object's place and its index in it."""
    locations = [(ref.stored.ref, ref.index) if isinstance(ref, ValueRef) else (ref, 0) for ref in refs]
    positions = {ref: at for at, ref in enumerate(dict.fromkeys(ref for ref, _ in locations))}
    return [*positions], [(positions[ref], index) for ref, index in locations]


def bytes_by_node(jobs: Sequence[Job]) -> list[Counter[str]]:
    """The bytes of each job's inputs in object stores, by node id. This process must own them."""
    read = [{ref for ref in inputs(job.inputs)[0] if isinstance(ref, ObjectRef)} for job in jobs]
    refs = set().union(*read)
    locations = get_local_object_locations(list(refs)) if refs else {}
    num_bytes = [Counter[str]() for _ in jobs]
    for stored, job_refs in zip(num_bytes, read, strict=True):
        for location in (locations[ref] for ref in job_refs if ref in locations):
            stored.update(dict.fromkeys(location["node_ids"], location["object_size"]))
    return num_bytes


def homes(stored: Sequence[Mapping[str, int]], nodes: Sequence[str]) -> list[str | None]:
    """The home of each job: of the sorted nodes of all actors, the one with the most bytes of the job's inputs.

    Jobs without inputs in their object stores are spread evenly, consecutive ones to one node, so that sums of clients
    which are added first lie on one node.
    """
    even = [nodes[index * len(nodes) // len(stored)] for index in range(len(stored))]
    return [
        max(bytes_of_job.keys() & nodes, key=lambda node: (bytes_of_job[node], node), default=other)
        for bytes_of_job, other in zip(stored, even, strict=True)
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
        queues = self._queues
        return (queues.get(node) or queues.get(None) or max(queues.values(), key=len)).popleft()

    def put_back(self, index: int) -> None:
        """Let a job wait again, before the others of its home."""
        queue = self._queues[self._homes[index]]
        if index not in queue:
            queue.appendleft(index)

    def keep_before(self, index: int) -> None:
        """Drop the jobs after this one."""
        for home, queue in self._queues.items():
            self._queues[home] = deque(waiting for waiting in queue if waiting < index)
