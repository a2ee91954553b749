"""What travels between the round loop and the workers: jobs, what they share, and what they report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayfl.compress.base import Message
from rayfl.methods.base import Plan, Work
from rayfl.summation import Node
from rayfl.tree import Arrays

Role = Literal["upload", "keep", "lost"]
"""A client's part in a round: it trains and its update reaches the others; it trains for itself; it downloads and
vanishes, so that its state stays as before the round."""


class ClientError(RuntimeError):
    """A client's work failed; the message names the round, the client and the cause."""


@dataclass(frozen=True)
class Shared:
    """What all jobs of one wave have in common; put once. `server` is the server's state where methods need it."""

    round: int
    plan: Plan
    message: Message = field(default_factory=dict)
    server: Arrays | None = None
    model: Arrays | None = None
    judged: bool = False


@dataclass(frozen=True)
class TrainJob:
    """Clients to train: the chunks below one node of the summation tree, each a tuple of (client, role).

    Inputs: for each client in order its state, then its link, where the setup has such. Outputs: for each client that
    is not lost, in order, its new state, its new link, and its message (peers) or relayed packets (server).
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
class PooledJob:
    """A run of the pooled test set on which the global model is judged."""

    first: int
    last: int


@dataclass(frozen=True)
class Report:
    """What one client did in a wave. `relayed` names the packets that it left for others to read unopened.

    `num_values`: numbers in its message, which papers count instead of bits.
    """

    client: int
    sent: bool = False
    uplink_bits: int = 0
    downlink_bits: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    relayed: tuple[str, ...] = ()
    num_values: int = 0


@dataclass(frozen=True)
class Trained:
    """A training job's result: its node's partial sums by message name (on the wire), and a report a client."""

    node: Node
    sums: Mapping[str, Any]
    reports: tuple[Report, ...]
