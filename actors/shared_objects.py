"""Objects of the store that several values share, each of which is read without the others.

Every object costs its owner about a kilobyte and some time, so a million clients' states should not be a million
objects. A `Part` is the reference to one value. It stays the same when the value moves to another object, for example
because most values of its object are no longer used.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
from ray import ObjectRef, cloudpickle

from rayfl.rounds.executor import Job, Ref
from rayfl.tree import ALIGNMENT_BYTES


@dataclass(eq=False)
class Stored:
    """An object with `size` values. `parts`: the references to these values that are still in use."""

    ref: ObjectRef
    size: int
    parts: "WeakSet[Part]" = field(default_factory=WeakSet)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Part:
    """A reference to one value of an object."""

    stored: Stored
    index: int

    def __post_init__(self) -> None:
        self.stored.parts.add(self)

    def move(self, new: "Part") -> None:
        """Refer to the value of another reference."""
        self.stored.parts.discard(self)
        self.stored, self.index = new.stored, new.index
        self.stored.parts.add(self)


class Packed:
    """Several values in one buffer. Only the value that is asked for is unpickled; its arrays are views of the buffer.

    Values may hold no references to objects.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.firsts, spans, pieces, first = [0], list[tuple[int, int]](), list[bytes | memoryview](), 0
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
        self.spans, self.buffer = np.array(spans), np.frombuffer(b"".join(pieces), np.uint8)

    # Any: a value of any type.
    def __getitem__(self, index: int) -> Any:
        spans = self.spans[self.firsts[index] : self.firsts[index + 1]].tolist()
        head, *buffers = (self.buffer[first:last].data for first, last in spans)
        return pickle.loads(head, buffers=buffers)  # noqa: S301 - an object of this run


# Any: the content of an object.
def value(content: Any, index: int) -> Any:
    """The value of a Part, from the content of its object."""
    return content[index] if isinstance(content, Packed) else content


def objects(job: Job) -> list[Sequence[int]]:
    """The outputs of a job, by position, in each object of its call, in the order in which the objects are complete."""
    kept = [column[at : at + job.together] for column in job.kept for at in range(0, len(column), job.together)]
    alone = {*range(job.num_outputs)}.difference(*kept)
    return sorted([*kept, *((at,) for at in alone)], key=lambda group: group[-1])


# Any: outputs of a job, or what is stored of them.
def in_objects(outputs: Iterable[Any], together: Iterable[Sequence[int]]) -> Iterator[Any]:
    """Yield the objects of a call as soon as each is complete."""
    left, held = enumerate(outputs), dict[int, Any]()
    for group in together:
        while group[-1] not in held:
            at, held[at] = next(left)
        values = [held.pop(at) for at in group]
        yield Packed(values) if len(values) > 1 else values[0]


def references(job: Job, refs: Iterable[ObjectRef]) -> list[Ref]:
    """A reference to each output of a job from those to its objects: a Part if the output is kept."""
    found: dict[int, Ref] = {}
    for group, ref in zip(objects(job), refs, strict=True):
        stored = Stored(ref, len(group)) if any(group[0] in column for column in job.kept) else None
        found |= {at: ref if stored is None else Part(stored, index) for index, at in enumerate(group)}
    return [found[at] for at in range(job.num_outputs)]


def inputs(refs: Sequence[Ref]) -> tuple[list[Ref], list[tuple[int, int]]]:
    """The distinct objects behind references or None, and for each reference the object's place and its index in it."""
    found = [(ref.stored.ref, ref.index) if isinstance(ref, Part) else (ref, 0) for ref in refs]
    places = {ref: at for at, ref in enumerate(dict.fromkeys(ref for ref, _ in found))}
    return [*places], [(places[ref], index) for ref, index in found]
