"""What travels between the round loop and the workers: jobs, what they share, and what they report."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rayfl.compress.base import Message
from rayfl.determinism.addition_order import Node
from rayfl.methods.base import Plan, Work
from rayfl.population.sampling import Status
from rayfl.tree import Arrays

Role = Literal["upload", "keep", "upload_lost", "train_only", "download_only"]
"""A client's part in a round: it trains and its update reaches the others; it trains for itself; its update is sent and
lost on the way; it vanishes once it has trained; it vanishes once it has downloaded. In the last three its state stays
as before the round, and in the last two nobody needs its training, which is billed and not done."""

TRAINS: tuple[Role, ...] = ("upload", "keep", "upload_lost")
"""The roles that leave something behind, kept or not."""


class ClientError(RuntimeError):
    """A client's work failed; the message names the round, the client and the cause."""


class OutOfMemory(ClientError):
    """A client's work found no memory: nothing is wrong with its code, and another worker may have more."""


SMALLER = "start a new run with a smaller method.batch_size or runtime.chunk_size"
"""What makes local work need less memory; it changes the numbers, so that a resumed run cannot have it."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory, of the machine or of its GPU."""
    if isinstance(error, MemoryError | OutOfMemory | torch.cuda.OutOfMemoryError):
        return True
    # What torch's own allocator on the CPU raises, and CUDA's libraries, has no type of its own.
    return isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error)))


def described(error: BaseException) -> str:
    """An exception's type and the first of its lines, as part of a sentence."""
    return ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0].strip())))


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
    """Clients to train: the chunks below one node of the summation tree, each a tuple of (client, role).

    Inputs: for each client in order its state, then its link, where the setup has such. Outputs: for each client that
    trains, in order, its new state, its new link, its message (where `Setup.keeps_messages`; with its weight if there
    is a server), and its relayed packets (server).
    """

    node: Node
    chunks: Mapping[int, tuple[tuple[int, Role], ...]]

    @property
    def clients(self) -> tuple[tuple[int, Role], ...]:
        """All (client, role) in order."""
        return tuple(pair for chunk in self.chunks.values() for pair in chunk)


@dataclass(frozen=True)
class ClientJob:
    """Clients whose states, then links where the setup has such, are the inputs."""

    clients: tuple[int, ...]


@dataclass(frozen=True)
class MixJob:
    """Receivers with their mixing rows {sender: weight}. Inputs: the receivers' states, then the senders' messages."""

    rows: Mapping[int, Mapping[int, float]]
    senders: tuple[int, ...]


@dataclass(frozen=True)
class AddJob:
    """Messages to add up: the chunks below one node of the summation tree. Inputs: (message, weight) by client."""

    node: Node
    chunks: Mapping[int, tuple[int, ...]]

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients in order."""
        return tuple(client for chunk in self.chunks.values() for client in chunk)


@dataclass(frozen=True)
class PooledJob:
    """A run of the pooled test set on which the global model is judged."""

    first: int
    last: int


@dataclass(frozen=True)
class ClientResult:
    """What one client did in a wave. `relayed` names the packets that it left for others to read unopened.

    `num_values`: numbers in its message, which papers count instead of bits. `reply_bits`: the part of the downlink
    that came after the server's update. `undone`: nothing of its round counts, its state stays as before; `status` says
    why where that was not drawn, and `cut_s` when the server hung up, in simulated seconds.
    """

    client: int
    sent: bool = False
    uplink_bits: int = 0
    downlink_bits: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    relayed: tuple[str, ...] = ()
    num_values: int = 0
    reply_bits: int = 0
    undone: bool = False
    status: Status | None = None
    cut_s: float | None = None


@dataclass(frozen=True)
class Trained:
    """A training job's result: its node's partial sums by message name (on the wire), and a report a client."""

    node: Node
    sums: Mapping[str, Any]
    reports: tuple[ClientResult, ...]
