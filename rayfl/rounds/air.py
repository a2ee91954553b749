"""Air: the clients that are under way between two updates of the server, under a schedule that is not in rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from rayfl.errors import RayflError
from rayfl.rounds.client_outputs import ClientOutputs
from rayfl.rounds.executor import Ref
from rayfl.rounds.worker_jobs import ClientResult
from rayfl.tree import Arrays


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
