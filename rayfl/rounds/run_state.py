"""RunState: what is kept from one round to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from rayfl.errors import RayflError
from rayfl.rounds.client_outputs import ClientOutputs, Slots
from rayfl.rounds.executor import Ref
from rayfl.rounds.worker_jobs import ClientResult
from rayfl.tree import Arrays, State


class Flight(NamedTuple):
    """A client's download, training and upload.

    number: of the run's flights, from 0. version: the number of updates before it. began_s: simulated seconds from the
    start of the run; earliest_s: the earliest at which it can end; ends_s: when it ends, or the earliest until it is
    trained (`result`). outputs: what the client's training left.
    """

    number: int
    client: int
    version: int
    began_s: float
    earliest_s: float
    ends_s: float
    result: ClientResult | None = None
    outputs: ClientOutputs = ClientOutputs()

    @property
    def place(self) -> tuple[float, int]:
        """Its place in the order in which flights end."""
        return self.ends_s, self.client


@dataclass(frozen=True)
class Air:
    """What a schedule keeps from one update to the next.

    second: of the last update. next_number: above those of all flights so far. flights: those under way, by client.
    busy_s: by client, the second until which the download of a reply takes. versions: the server's states from which
    flights under way began, as arrays.
    """

    second: float = 0.0
    next_number: int = 0
    flights: Mapping[int, Flight] = field(default_factory=dict)
    busy_s: Mapping[int, float] = field(default_factory=dict)
    versions: Mapping[int, Ref] = field(default_factory=dict)

    def to_arrays(self) -> Arrays:
        """Everything but the versions. Results of training are left out: it can be done again."""
        flights = [*self.flights.values()]
        return {
            "second": np.array(self.second),
            "next_number": np.array(self.next_number),
            "flights": np.array([one[:3] for one in flights], dtype=np.int64).reshape(-1, 3),
            "seconds": np.array([one[3:5] for one in flights], dtype=np.float64).reshape(-1, 2),
            "busy": np.array([*self.busy_s], dtype=np.int64),
            "busy_s": np.array([*self.busy_s.values()], dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays, versions: Mapping[int, Ref]) -> Self:
        """The inverse of `to_arrays`. Raise an error for anything else."""
        rows = zip(arrays["flights"].tolist(), arrays["seconds"].tolist(), strict=True)
        flights = {
            client: Flight(number, client, version, began_s, earliest_s, earliest_s)
            for (number, client, version), (began_s, earliest_s) in rows
        }
        busy_s = dict(zip(arrays["busy"].tolist(), arrays["busy_s"].tolist(), strict=True))
        if {one.version for one in flights.values()} != {*versions}:
            raise RayflError("a version that a flight needs is missing, or has no flight")
        return cls(float(arrays["second"]), int(arrays["next_number"]), flights, busy_s, versions)


@dataclass(frozen=True)
class RunState:
    """What is kept from one round to the next: the next round's number, the server's state, those of the selection and
    of a compressed downlink, references to clients' states and to the server's memories of them, and who is under way.

    A client that has not taken part yet is in neither `states` nor `server_memories`. `changed`: the round in which
    they last changed, by client; clients that have not changed since the run was started or resumed may be missing.
    """

    round: int = 0
    server: State = field(default_factory=dict)
    selection: State = field(default_factory=dict)
    downlink: State = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)
    air: Air = field(default_factory=Air)
    changed: Mapping[int, int] = field(default_factory=dict)

    def inputs(self, slots: Slots, clients: Sequence[int]) -> tuple[Ref, ...]:
        """References to the states and memories of clients, which a call reads; None before a client's first round."""
        kept = (ClientOutputs(self.states.get(client), self.server_memories.get(client)) for client in clients)
        return tuple(ref for outputs in kept for ref in outputs.pack(slots))

    def updated(self, slots: Slots, outputs: Mapping[int, ClientOutputs]) -> "RunState":
        """The run state with the new states and memories of these clients."""
        if not slots:
            return self
        states = {client: one.state for client, one in outputs.items()} if slots.state else {}
        memories = {client: one.memory for client, one in outputs.items()} if slots.memory else {}
        return replace(
            self,
            states={**self.states, **states},
            server_memories={**self.server_memories, **memories},
            changed={**self.changed, **dict.fromkeys(outputs, self.round)},
        )
