"""What outlives a round in runs without rounds: flights under way, of clients with a server (`Air`) and of peers on
their own clocks (`Clocks`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from rayfl import tree
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import RayflError
from rayfl.rounds.executor import Ref
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult


class Flight(NamedTuple):
    """A client's download, training and upload. Times are simulated seconds from the start of the run.

    number: counts the run's flights, from 0. version: the number of updates before it. began_s: when it began;
    earliest_s: the earliest at which it can end; ends_s: when it ends, or earliest_s until it is trained (`result`).
    outputs: the objects that the client's training made; None if it has not trained.
    """

    number: int
    client: int
    version: int
    began_s: float
    earliest_s: float
    ends_s: float
    result: ClientResult | None = None
    outputs: ClientOutputs | None = None


@dataclass(frozen=True)
class Air:
    """What a schedule keeps from one update to the next.

    second: the simulated second of the last update. next_number: the number of the next flight. flights: those under
    way, by client. busy_s: by client, the second until which it downloads a reply. versions: the server's states from
    which flights under way began, as arrays.
    """

    second: float = 0.0
    next_number: int = 0
    flights: Mapping[int, Flight] = field(default_factory=dict)
    busy_s: Mapping[int, float] = field(default_factory=dict)
    versions: Mapping[int, Ref] = field(default_factory=dict)

    def to_arrays(self) -> tree.ArrayTree:
        """Everything but the versions. Results of training are left out, because training can be done again."""
        flights = [*self.flights.values()]
        return {
            "second": np.array(self.second),
            "next_number": np.array(self.next_number),
            "flights": np.array([flight[:3] for flight in flights], dtype=np.int64).reshape(-1, 3),
            "seconds": np.array([flight[3:5] for flight in flights], dtype=np.float64).reshape(-1, 2),
            "busy": np.array([*self.busy_s], dtype=np.int64),
            "busy_s": np.array([*self.busy_s.values()], dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: tree.ArrayTree, versions: Mapping[int, Ref]) -> Self:
        """The inverse of `to_arrays`. Raise an error for anything else."""
        flights = {flight.client: flight for flight in _flights(arrays)}
        busy_s = dict(zip(arrays["busy"].tolist(), arrays["busy_s"].tolist(), strict=True))
        if {flight.version for flight in flights.values()} != {*versions}:
            raise RayflError("a version that a flight needs is missing, or has no flight")
        return cls(float(arrays["second"]), int(arrays["next_number"]), flights, busy_s, versions)


class Mail(NamedTuple):
    """A peer's message, from the end of the training that made it until none of its receivers can need it any more.

    number: that of the training, among those of the sender; end: among those of all peers that have ended, from 1.
    leaves_s: the second at which its first copy begins to be sent; bits: the size of a copy; receivers: ascending, as
    copies are sent one after another.
    """

    number: int
    end: int
    bits: int
    leaves_s: float
    receivers: tuple[int, ...]
    message: Ref


@dataclass
class Peer:
    """What a peer on its own clock keeps from one round to the next.

    number: how many of its trainings have ended. unmixed: whether the last of them still waits for its exchange. mail:
    its messages, oldest first. partner: the neighbour with which it is exchanging models, or `NOBODY`. met: how often
    others have changed its model since its training began. trained: the number and the round of the training that has
    made `model`. begun: the state from which its training began, if partners may have changed it.
    """

    number: int = 0
    unmixed: bool = False
    partner: int = NOBODY
    met: int = 0
    trained: tuple[int, int] = (NOBODY, NOBODY)
    mail: tuple[Mail, ...] = ()
    model: Ref = None
    begun: Ref = None


@dataclass(frozen=True)
class Clocks:
    """What peers on their own clocks keep from one round to the next.

    second: the simulated second at which the last round ended. num_ended: trainings of all peers that have ended; done:
    those of them that count for the next round. flights: trainings under way, by peer. peers: all; () before round 0.
    """

    second: float = 0.0
    num_ended: int = 0
    done: int = 0
    flights: Mapping[int, Flight] = field(default_factory=dict)
    peers: Sequence[Peer] = ()

    def objects(self) -> dict[str, dict[int, Ref]]:
        """References to messages, by their end, and to peers' models and states, by the kinds of a checkpoint's files.

        A message is in it once, however many peers may still read it.
        """
        peers = [*enumerate(self.peers)]
        return {
            "messages": {mail.end: mail.message for _, peer in peers for mail in peer.mail},
            "models": {client: peer.model for client, peer in peers if peer.model is not None},
            "begun": {client: peer.begun for client, peer in peers if peer.begun is not None},
        }

    def to_arrays(self) -> tree.ArrayTree:
        """Everything but the objects. Results of training are left out, because training can be done again."""
        flights = [*self.flights.values()]
        mails = [(client, mail) for client, peer in enumerate(self.peers) for mail in peer.mail]
        counts = [(peer.number, peer.unmixed, peer.partner, peer.met, *peer.trained) for peer in self.peers]
        return {
            "second": np.array(self.second),
            "counts": np.array([self.num_ended, self.done]),
            "flights": np.array([flight[:3] for flight in flights], dtype=np.int64).reshape(-1, 3),
            "seconds": np.array([flight[3:5] for flight in flights], dtype=np.float64).reshape(-1, 2),
            "peers": np.array(counts, dtype=np.int64).reshape(-1, 6),
            "mail": np.array(
                [(client, *mail[:3], len(mail.receivers)) for client, mail in mails], dtype=np.int64
            ).reshape(-1, 5),
            "leaves_s": np.array([mail.leaves_s for _, mail in mails], dtype=np.float64),
            "receivers": np.array([receiver for _, mail in mails for receiver in mail.receivers], dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: tree.ArrayTree, objects: Mapping[str, Mapping[int, Ref]]) -> Self:
        """The inverse of `to_arrays`. Raise an error for anything else."""
        peers = [
            Peer(number, bool(unmixed), partner, met, (trained, round_number))
            for number, unmixed, partner, met, trained, round_number in arrays["peers"].tolist()
        ]
        rows = arrays["mail"].tolist()
        ends = np.cumsum([0, *arrays["mail"][:, 4].tolist()]).tolist()
        receivers = [tuple(arrays["receivers"][first:last].tolist()) for first, last in pairwise(ends)]
        mails = zip(rows, arrays["leaves_s"].tolist(), receivers, strict=True)
        for (client, number, end, bits, _), leaves_s, to in mails:
            mail = Mail(number, end, bits, leaves_s, to, objects["messages"][end])
            peers[client].mail = (*peers[client].mail, mail)
        for client, peer in enumerate(peers):
            peer.model, peer.begun = objects["models"].get(client), objects["begun"].get(client)
        num_ended, done = arrays["counts"].tolist()
        flights = {flight.client: flight for flight in _flights(arrays)}
        clocks = cls(float(arrays["second"]), num_ended, done, flights, peers)
        if {kind: {*refs} for kind, refs in clocks.objects().items()} != {
            kind: {*refs} for kind, refs in objects.items()
        }:
            raise RayflError("a message, or a state or model of a peer, is missing or not needed")
        return clocks


def _flights(arrays: tree.ArrayTree) -> Iterator[Flight]:
    """The flights of a checkpoint, which are not trained."""
    rows = zip(arrays["flights"].tolist(), arrays["seconds"].tolist(), strict=True)
    for (number, client, version), (began_s, earliest_s) in rows:
        yield Flight(number, client, version, began_s, earliest_s, earliest_s)
