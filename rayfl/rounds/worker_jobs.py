"""What travels between the round loop and the workers: jobs, the inputs that they share, and their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rayfl.compress.base import Message
from rayfl.determinism.addition_order import Node
from rayfl.methods.base import Plan, Work
from rayfl.population.fate import Fate
from rayfl.tree import Arrays


@dataclass(frozen=True)
class RoundInputs:
    """What all jobs of one wave have in common; put once. `server` is the server's state where methods need it."""

    round: int
    plan: Plan
    message: Message = field(default_factory=dict)
    server: Arrays | None = None
    model: Arrays | None = None
    evaluated: bool = False


@dataclass(frozen=True)
class TrainJob:
    """A run of a round's participants to train: the nodes of the summation tree that it is, and each client's fate.

    Inputs: `Setup.memory_slots` of all clients. Outputs: `Setup.output_slots` of `trained`, then what each node has
    sent (`partial_sums.Sent`); nothing of the latter where `Setup.keeps_messages`. `packets`: that may be packets.
    """

    kind: ClassVar[str] = "train"
    nodes: tuple[Node, ...]
    fates: Mapping[int, Fate]
    packets: bool = False

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients in order, one for each leaf of the nodes."""
        return tuple(self.fates)

    @property
    def trained(self) -> tuple[int, ...]:
        """The clients whose training is needed, in order."""
        return tuple(client for client, fate in self.fates.items() if fate.trains)


@dataclass(frozen=True)
class ClientJob:
    """Clients, and nothing else: what is done with them is the job's class."""

    kind: ClassVar[str]
    clients: tuple[int, ...]


class ReplyJob(ClientJob):
    """Clients that receive the server's reply. Inputs and outputs: `Setup.memory_slots`."""

    kind: ClassVar[str] = "reply"


class EvaluateJob(ClientJob):
    """Clients whose own models are evaluated. Inputs: `Setup.state_slots`."""

    kind: ClassVar[str] = "evaluate"


class MaskJob(ClientJob):
    """Clients whose masks are wanted. Inputs: `Setup.state_slots`."""

    kind: ClassVar[str] = "masks"


class MeanModelJob(ClientJob):
    """Clients whose models are averaged. Inputs: `Setup.state_slots`. Output: the mean."""

    kind: ClassVar[str] = "mean_model"


@dataclass(frozen=True)
class MixJob:
    """Receivers with their mixing rows {sender: weight}. Inputs: the receivers' states, then the senders' messages.

    Outputs: the receivers' new states.
    """

    kind: ClassVar[str] = "mix"
    rows: Mapping[int, Mapping[int, float]]
    senders: tuple[int, ...]

    @property
    def clients(self) -> tuple[int, ...]:
        """The receivers."""
        return tuple(self.rows)


@dataclass(frozen=True)
class AddJob:
    """Messages to add up, one for each leaf of the nodes.

    Inputs: (message, weight) by client. Outputs: the sums of each node (`partial_sums.Added`).
    """

    kind: ClassVar[str] = "add"
    nodes: tuple[Node, ...]
    clients: tuple[int, ...]


@dataclass(frozen=True)
class MergeJob:
    """A node of the summation tree, and nodes that cover it. Inputs: what these have sent. Output: its sum."""

    kind: ClassVar[str] = "merge"
    node: Node
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class PooledJob:
    """A run of the pooled test set, or of all clients' training examples, on which the global model is evaluated."""

    kind: ClassVar[str] = "evaluate_pooled"
    first: int
    last: int
    split: Literal["test", "train"] = "test"


WorkerJob = TrainJob | ClientJob | MixJob | AddJob | MergeJob | PooledJob
"""What a worker can be asked to do; the job's class decides which of its methods does it."""


@dataclass(frozen=True)
class ClientResult:
    """What one client did in a wave of calls, and what it is billed.

    `message_bits`: size of the message that it encoded; `billed_bits`: what it sent, which is less for a client that
    was cut off, and more for a peer with several receivers. `relayed`: names of the packets that it left for others to
    read unopened. `num_values`: numbers in its message, which papers count instead of bits, and `num_received` those in
    what a server sent it. `reply_bits`: the part of the downlink that came after the server's update. `cut_s`: when
    the server stopped waiting, in simulated seconds.
    """

    client: int
    fate: Fate = Fate.NOT_SELECTED
    message_bits: int = 0
    billed_bits: int = 0
    downlink_bits: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    relayed: tuple[str, ...] = ()
    num_values: int = 0
    num_received: int = 0
    reply_bits: int = 0
    cut_s: float | None = None

    @property
    def num_examples(self) -> int:
        """Examples seen in all stages."""
        return sum(work.num_examples for work in self.work.values())

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(work.num_steps for work in self.work.values())


@dataclass(frozen=True)
class Trained:
    """The results of a job's clients, and the bytes that the sums of all its nodes have, or would have."""

    results: tuple[ClientResult, ...] = ()
    sum_bytes: int = 0
