"""RunState: what is kept from one round to the next, with the flights under way in runs without rounds: of clients with
a server (`Air`) and of peers on their own clocks (`Clocks`). CurrentRound: one round while it runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from rayfl import tree
from rayfl.determinism.addition_order import runs
from rayfl.determinism.global_draws import apart
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import RayflError
from rayfl.methods.base import Context, Message, State
from rayfl.rounds.executor import Executor, Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientJob, ClientOutputs, ClientResult, RoundInputs, Slots
from rayfl.untyped import Anything


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
        return {
            "second": np.array(self.second),
            "next_number": np.array(self.next_number),
            **_flight_arrays(self.flights.values()),
            "busy": np.array([*self.busy_s], dtype=np.int64),
            "busy_s": np.array([*self.busy_s.values()], dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: tree.ArrayTree, versions: Mapping[int, Ref]) -> Self:
        """The inverse of `to_arrays`. Raise an error for anything else."""
        flights = _flights(arrays)
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
        mails = [(client, mail) for client, peer in enumerate(self.peers) for mail in peer.mail]
        counts = [(peer.number, peer.unmixed, peer.partner, peer.met, *peer.trained) for peer in self.peers]
        return {
            "second": np.array(self.second),
            "counts": np.array([self.num_ended, self.done]),
            **_flight_arrays(self.flights.values()),
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
        ends = np.cumsum([0, *arrays["mail"][:, 4].tolist()]).tolist()
        receivers = [tuple(arrays["receivers"][first:last].tolist()) for first, last in pairwise(ends)]
        for (client, number, end, bits, _), leaves_s, to in zip(
            arrays["mail"].tolist(), arrays["leaves_s"].tolist(), receivers, strict=True
        ):
            peers[client].mail = (*peers[client].mail, Mail(number, end, bits, leaves_s, to, objects["messages"][end]))
        for client, peer in enumerate(peers):
            peer.model, peer.begun = objects["models"].get(client), objects["begun"].get(client)
        num_ended, done = arrays["counts"].tolist()
        clocks = cls(float(arrays["second"]), num_ended, done, _flights(arrays), peers)
        if {kind: {*refs} for kind, refs in clocks.objects().items()} != {
            kind: {*refs} for kind, refs in objects.items()
        }:
            raise RayflError("a message, or a state or model of a peer, is missing or not needed")
        return clocks


def _flight_arrays(flights: Iterable[Flight]) -> tree.ArrayTree:
    """Flights without their training."""
    return {
        "flights": np.array([flight[:3] for flight in flights], dtype=np.int64).reshape(-1, 3),
        "seconds": np.array([flight[3:5] for flight in flights], dtype=np.float64).reshape(-1, 2),
    }


def _flights(arrays: tree.ArrayTree) -> dict[int, Flight]:
    """The inverse of `_flight_arrays`, by client."""
    rows = zip(arrays["flights"].tolist(), arrays["seconds"].tolist(), strict=True)
    return {
        client: Flight(number, client, version, began_s, earliest_s, earliest_s)
        for (number, client, version), (began_s, earliest_s) in rows
    }


@dataclass(frozen=True)
class RunState:
    """What is kept from one round to the next: the next round's number, the states of the server, the selection, a
    compressed downlink and the early stop, who has told its label counts, references to clients' states and to the
    server's memories of them, the flights under way, and those of peers on their own clocks.

    A client that has not taken part yet is in neither `states` nor `server_memories`. `changed`: by client, the round
    in which they last changed; clients that have not changed since the run was started or resumed may be missing.
    """

    round: int = 0
    server: State = field(default_factory=dict)
    selection: State = field(default_factory=dict)
    downlink: State = field(default_factory=dict)
    told: State = field(default_factory=dict)
    stop: tree.ArrayTree = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)
    air: Air = field(default_factory=Air)
    clocks: Clocks = field(default_factory=Clocks)
    changed: Mapping[int, int] = field(default_factory=dict)

    def inputs(self, slots: Slots, clients: Sequence[int]) -> tuple[Ref, ...]:
        """References to the states and memories of clients, which a call reads; None before a client's first round."""
        kept = (ClientOutputs(self.states.get(client), self.server_memories.get(client)) for client in clients)
        return tuple(ref for outputs in kept for ref in outputs.pack(slots))

    def updated(self, slots: Slots, outputs: Mapping[int, ClientOutputs]) -> "RunState":
        """The run state with the new states and memories of these clients."""
        if not slots:
            return self
        states = {client: output.state for client, output in outputs.items()} if slots.state else {}
        memories = {client: output.memory for client, output in outputs.items()} if slots.memory else {}
        return replace(
            self,
            states={**self.states, **states},
            server_memories={**self.server_memories, **memories},
            changed={**self.changed, **dict.fromkeys(outputs, self.round)},
        )


LARGE_MODEL = 2_000_000
"""Above this number of parameters, sending a partial sum costs more than waiting for the slowest call."""

MANY_WORKERS = 32
"""Above this number of workers a second call of each costs more than it evens out: one process sends all calls, and
needs up to 2 ms for each."""


def server_inputs(setup: Setup, server: State, ctx: Context, message: Message) -> RoundInputs:
    """The inputs of clients that begin in the round of `ctx`; `server` is the server's state before that round."""
    return RoundInputs(
        round=ctx.round,
        plan=ctx.plan,
        message=message,
        server=tree.to_arrays(server) if setup.server_half.overrides("personal_message") else None,
        evaluated=setup.evaluated(ctx.round),
    )


@dataclass
class CurrentRound:
    """One round while it runs.

    `inputs`: what the workers read in the next wave of calls; `change_inputs` replaces them. `run_state`: replaced
    whenever clients have new states; the run state before the round is never changed. `ledger`: what clients did.
    """

    setup: Setup
    executor: Executor
    run_state: RunState
    inputs: RoundInputs
    ledger: Ledger
    _put: Ref = field(default=None, init=False)

    @property
    def number(self) -> int:
        """The number of this round, from 0."""
        return self.inputs.round

    def change_inputs(self, **fields: Anything) -> None:
        """Replace fields of `inputs` for the calls that follow."""
        self.inputs, self._put = replace(self.inputs, **fields), None

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Run one wave of jobs. All waves with the same `inputs` share one object."""
        if self._put is None:
            self._put = self.executor.put(self.inputs)
        # Whoever runs them, the round's own draws go on afterwards.
        with apart():
            return self.executor.run(self._put, jobs)

    @property
    def calls_per_wave(self) -> int:
        """Calls that a wave is cut into: two per worker, which evens out unequal clients; one if models are large or
        workers many."""
        is_large = tree.num_entries(self.setup.initial) > LARGE_MODEL
        return self.executor.num_workers * (1 if is_large or self.has_many_workers else 2)

    @property
    def has_many_workers(self) -> bool:
        """Whether there are so many workers that a second call of each costs more than it evens out."""
        return self.executor.num_workers > MANY_WORKERS

    def client_jobs(
        self, kind: type[ClientJob], clients: Sequence[int], slots: Slots, outputs: int = 0, kept: bool = False
    ) -> list[Job]:
        """Jobs of one kind that together cover `clients`, with what is kept of each client.

        `outputs`: the number of values that a call leaves behind per client; `kept`: whether they are those of `slots`.
        """
        return [
            Job(
                kind(part),
                self.run_state.inputs(slots, part),
                outputs * len(part),
                slots.kept(len(part)) if kept else (),
                self.setup.together if kept else 1,
            )
            for part in runs(clients, self.calls_per_wave)
        ]

    def keep(self, slots: Slots, jobs: Iterable[Job], answers: Iterable[JobResult]) -> None:
        """Take the new states and memories of clients, which are the outputs of these jobs, into the run state."""
        outputs: dict[int, ClientOutputs] = {}
        for job, answer in zip(jobs, answers, strict=True):
            outputs |= ClientOutputs.unpack(slots, job.work.clients, answer.outputs)
        self.run_state = self.run_state.updated(slots, outputs)
