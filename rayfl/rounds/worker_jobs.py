"""The jobs that the round loop gives to workers: their inputs, which all jobs of a wave share, their results, and the
objects that they return for each client (`ClientOutputs`)."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import compress
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from rayfl import tree
from rayfl.determinism.addition_order import SumNode
from rayfl.errors import HookError
from rayfl.methods.base import Message, Plan, Stage, Work
from rayfl.population.client import ClientStatus


def num_values(message: Message) -> int:
    """Numbers in all packets of a message."""
    return sum(packet.num_values for packet in message.values())


class Missed(NamedTuple):
    """The size of earlier broadcasts that a client is sent: bits, and numbers as in `ClientResult.num_received`."""

    bits: int = 0
    values: int = 0


@dataclass(frozen=True)
class RoundInputs:
    """The inputs that all jobs of one wave share, stored once.

    `server`: the server's state, if workers need it. `begins`: by client, the simulated second from which it can train,
    minus the time of its download; the others begin at once. `missed`: by client, what it is sent beyond `message`.
    """

    round: int
    plan: Plan
    message: Message = field(default_factory=dict)
    server: tree.ArrayTree | None = None
    model: tree.ArrayTree | None = None
    evaluated: bool = False
    begins: Mapping[int, float] = field(default_factory=dict)
    missed: Mapping[int, Missed] = field(default_factory=dict)


class WorkerJob:
    """A job for a worker; the job's class decides which method of the worker does it. Those of peers are in mix.py."""


@dataclass(frozen=True)
class TrainJob(WorkerJob):
    """Trains consecutive participants of a round: nodes of the summation tree, and each client's status.

    Inputs: `Setup.memory_slots` of all clients. Outputs: `Setup.output_slots` of `trained`, then, unless
    `Setup.keeps_messages`, the messages of each node (`partial_sums.Sent`). `packets`: whether a
    node's messages may come back as packets instead of their sum. `numbers`: by client, the number of its flight, which
    keys its random draws; {} in rounds. `own_inputs`: whether the first input is the `RoundInputs` of these clients,
    instead of the wave's.
    """

    nodes: tuple[SumNode, ...]
    statuses: Mapping[int, ClientStatus]
    packets: bool = False
    numbers: Mapping[int, int] = field(default_factory=dict)
    own_inputs: bool = False

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients in order, one per leaf of the nodes."""
        return tuple(self.statuses)

    @property
    def trained(self) -> tuple[int, ...]:
        """The clients whose training is needed, in order."""
        return tuple(client for client, status in self.statuses.items() if status.trains)


@dataclass(frozen=True)
class ClientJob(WorkerJob):
    """A job whose only argument is the list of clients. The subclass says what to do with them."""

    clients: tuple[int, ...]


class PollJob(ClientJob):
    """Computes the loss of the server's model on examples of clients that are polled. No inputs."""


class ReplyJob(ClientJob):
    """Gives clients the server's reply. Inputs and outputs: `Setup.memory_slots`."""


class EvaluateJob(ClientJob):
    """Evaluates clients' own models. Inputs: `Setup.state_slots`."""


class NewcomerJob(ClientJob):
    """Lets unseen clients take a first round, of which nothing is kept, and evaluates their models. No inputs."""


@dataclass(frozen=True)
class EvaluateTrainedJob(WorkerJob):
    """Evaluates the models of flights that have ended. Inputs: the trained model of each client.

    `flights`: by client, the round in which its flight began, and the flight's number.
    """

    flights: Mapping[int, tuple[int, int]]

    @property
    def clients(self) -> tuple[int, ...]:
        """The flights' clients."""
        return tuple(self.flights)


class MaskJob(ClientJob):
    """Returns clients' masks. Inputs: `Setup.state_slots`."""


class PersonalModelJob(ClientJob):
    """Makes clients' models at the end of the run. Inputs: `Setup.state_slots`. Outputs: a model for each client."""


class MeanModelJob(ClientJob):
    """Averages clients' models. Inputs: `Setup.state_slots`. Output: the mean."""


@dataclass(frozen=True)
class AddJob(WorkerJob):
    """Adds up messages, one per leaf of the nodes.

    Inputs: (message, weight) by client. Outputs: the sums of each node (`partial_sums.Added`). `scales`: factors of the
    messages; () for 1.
    """

    nodes: tuple[SumNode, ...]
    clients: tuple[int, ...]
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class MergeJob(WorkerJob):
    """Adds up the sums of a node of the summation tree. Inputs: those of nodes that cover it. Output: its sum."""

    node: SumNode
    parts: tuple[SumNode, ...]


@dataclass(frozen=True)
class RewriteJob(WorkerJob):
    """Returns its inputs as outputs, so that they lie in new objects."""


@dataclass(frozen=True)
class RobustJob(WorkerJob):
    """Reads a slice of all messages called `name`: measures it, or combines it by the rule's `decision`.

    Inputs: (message, weight) by client. Result: what was measured; or output: the slice of the result.
    """

    name: str
    first: int
    last: int
    decision: np.ndarray | None


EvaluatedSplit = Literal["test", "train"]


@dataclass(frozen=True)
class PooledJob(WorkerJob):
    """Evaluates the global model on a part of the pooled test set, or of all clients' training examples.

    by_client: whether clients' own test splits are measured too.
    """

    first: int
    last: int
    split: EvaluatedSplit = "test"
    by_client: bool = False


class SplitSums(NamedTuple):
    """The metric sums of a model on `num_examples` examples, by the metrics' indices in `Setup.metrics`."""

    num_examples: int
    sums: Mapping[int, tree.ArrayTree]

    def only(self, places: Collection[int]) -> "SplitSums":
        """The sums of some metrics."""
        return SplitSums(self.num_examples, {place: sums for place, sums in self.sums.items() if place in places})

    @staticmethod
    def added(parts: Sequence["SplitSums"]) -> "SplitSums":
        """The sums of all parts, added in their order."""
        total = {
            place: {name: reduce(np.add, [part.sums[place][name] for part in parts]) for name in sums}
            for place, sums in parts[0].sums.items()
        }
        return SplitSums(sum(part.num_examples for part in parts), total)


@dataclass(frozen=True)
class ClientResult:
    """What one client did in a wave of calls, and what it is billed.

    `message_bits`: size of the message that it encoded; `billed_bits`: bits that it sent, which are less for a client
    that was cut off, and more for a peer with several receivers. `relayed`: names of its packets that the server
    forwards. `num_values`: numbers in its message, which papers count instead of bits; `num_received`: numbers in the
    server's messages to it. `reply_bits`: the part of the downlink that came after the server's update. `cut_s`: when
    the server stopped waiting, in simulated seconds. `stages`: the client's own; `costs`: of an example in each of
    them, see `example_costs`. `metrics`: None where undefined; `sums`: of metrics that are added over clients, by place
    ("own"). `begins_s`: as in `RoundInputs.begins`.
    """

    client: int
    status: ClientStatus = ClientStatus.NOT_SELECTED
    message_bits: int = 0
    billed_bits: int = 0
    downlink_bits: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    sums: Mapping[str, SplitSums] = field(default_factory=dict)
    relayed: tuple[str, ...] = ()
    num_values: int = 0
    num_received: int = 0
    reply_bits: int = 0
    cut_s: float | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    begins_s: float = 0.0

    def joined(self, later: "ClientResult") -> "ClientResult":
        """This result with those of a later wave: downloads are added up, metrics are joined."""
        return replace(
            self,
            downlink_bits=self.downlink_bits + later.downlink_bits,
            num_received=self.num_received + later.num_received,
            reply_bits=self.reply_bits + later.reply_bits,
            metrics={**self.metrics, **later.metrics},
            sums={**self.sums, **later.sums},
        )

    def followed(self, later: "ClientResult") -> "ClientResult":
        """This result with that of a later part of the round, in which the client has trained again, unless the part's
        status is `AT_WORK`. Amounts are added up, and metrics are those of the later part, but for operations."""
        part = self if later.status is ClientStatus.AT_WORK else later
        work = dict(self.work)
        for name, done in later.work.items():
            before = work.get(name, Work())
            work[name] = Work(before.num_steps + done.num_steps, before.num_examples + done.num_examples)
        operations = [result.metrics.get("flops/training") for result in (self, later)]
        both = {} if None in operations else {"flops/training": sum(filter(None, operations))}
        joined = self.joined(later)
        return replace(
            joined,
            metrics={**joined.metrics, **both},
            status=part.status,
            costs=part.costs,
            stages=part.stages,
            work=work,
            message_bits=self.message_bits + later.message_bits,
            billed_bits=self.billed_bits + later.billed_bits,
            num_values=self.num_values + later.num_values,
        )

    @property
    def num_examples(self) -> int:
        """Examples seen in all stages."""
        return sum(work.num_examples for work in self.work.values())

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(work.num_steps for work in self.work.values())


OBJECT_BYTES = 1_000_000
"""States of several clients share an object up to this size: to fetch it takes hardly longer than to fetch one of them,
since every object takes about a millisecond."""


@dataclass(frozen=True)
class Slots:
    """Which objects a call carries per client.

    The flat list has all objects of the first client in field order, then the next client's.
    """

    state: bool = False
    memory: bool = False
    message: bool = False
    packets: tuple[str, ...] = ()
    model: bool = False

    def __len__(self) -> int:
        return self.state + self.memory + self.message + self.model + len(self.packets)

    def kept(self, num_clients: int) -> tuple[range, ...]:
        """The places of the states of all clients, and of the memories."""
        return tuple(
            range(at, num_clients * len(self), len(self)) for at in range(self.state + self.memory) if num_clients
        )


# Any: the caller has references; the worker has the objects behind them.
@dataclass(frozen=True)
class ClientOutputs:
    """The objects of one client in a call; None if there is no such object, or if the call has no slot for it.

    `memory`: the server's memory of the client; `message`: the client's message (with its weight, if there is a
    server); `packets`: the packets that the server forwards without decoding them, by message name; `model`: the
    trained model, if it is evaluated later.
    """

    state: Any = None
    memory: Any = None
    message: Any = None
    packets: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None

    @classmethod
    def of(cls, slots: Slots, state: tree.State, memory: tree.State, **sent: Any) -> Self:
        """The outputs with state and memory as arrays. Raise HookError for one that the method did not begin with."""
        firsts = ((state, slots.state, "init_client"), (memory, slots.memory, "init_server_memory"))
        if lost := [hook for kept, has_slot, hook in firsts if kept and not has_slot]:
            raise HookError(f"a hook returns a state to keep, and {lost[0]} returned none; return the first one there")
        return cls(tree.to_arrays(state), tree.to_arrays(memory), **sent)

    def pack(self, slots: Slots) -> list[Any]:
        """The objects that have a slot, in order."""
        values = (self.state, self.memory, self.message, self.model)
        return [
            *compress(values, (slots.state, slots.memory, slots.message, slots.model)),
            *map(self.packets.get, slots.packets),
        ]

    @classmethod
    def unpack(cls, slots: Slots, clients: Sequence[int], objects: Iterable[Any]) -> dict[int, Self]:
        """The inverse of `pack` for the clients of a call."""
        left = iter(objects)
        return {client: cls._next(slots, left) for client in clients}

    @classmethod
    def _next(cls, slots: Slots, left: Iterator[Any]) -> Self:
        state, memory, message, model = [
            next(left) if has else None for has in (slots.state, slots.memory, slots.message, slots.model)
        ]
        return cls(state, memory, message, {name: next(left) for name in slots.packets}, model)
