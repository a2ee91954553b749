"""Peers on their own clocks that hear all their neighbours (`Inboxes`), or average models in pairs (`Meetings`).

A message leaves when its sender's training has ended and the sender's earlier messages have left, one copy after
another. Nothing happens when it arrives: a peer looks for messages when it mixes. What has not arrived, or is too old,
is left out, and the peer itself gets its weight. A peer that hears nobody goes on with its own model.

A pair averages models after a training of one of them. First the training ends: with it the transfer of both models
begins. When it ends, the two peers average their models of that moment, and the first one begins its next training from
what this leaves. The other one goes on with its training.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.determinism.addition_order import runs
from rayfl.determinism.global_draws import keyed
from rayfl.determinism.seeding import NOBODY, generator
from rayfl.errors import HookError
from rayfl.methods.base import uncompressed
from rayfl.population.client import ClientStatus
from rayfl.rounds.check_hooks import checked, checked_hook
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.mix import Meeting, MeetJob
from rayfl.rounds.peer_exchange import graph_among, in_calls, mix_job, row, weighted_graph
from rayfl.rounds.run_state import Flight, Mail, RunState
from rayfl.rounds.simulated_clock import moment
from rayfl.rounds.wakes import Wakes
from rayfl.rounds.worker_jobs import ClientOutputs, num_values


@dataclass
class Inboxes(Wakes):
    """Peers that hear all their neighbours: of each, the newest message that has arrived."""

    states: dict[int, ClientOutputs] = field(default_factory=dict)
    """The states of peers after trainings that have ended, until they are in the run state."""
    heard: dict[int, dict[int, tuple[float, Mail]]] = field(default_factory=dict)
    """By peer whose exchange is not computed yet, the weight and the message of each sender."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graph, self.weights = weighted_graph(self.current, self.exchange_of_all)
        self.hearers = self.graph.T.tocsr()
        """By peer, those that hear it, boolean [n, n]."""

    def end(self, flight: Flight) -> None:
        """The peer's new state and message are those of its training."""
        result, outputs, peer = self.note(flight), flight.outputs, self.peers[flight.client]
        if outputs is None or not result.status.keeps_state:
            return
        self.states[flight.client], peer.unmixed = ClientOutputs(outputs.state), True
        if result.status is not ClientStatus.DELIVERED:
            return
        leaves_s, receivers = self.second, tuple(row(self.hearers, flight.client))
        if peer.mail:
            last = peer.mail[-1]
            busy_s = len(last.receivers) * last.bits / self.traits[flight.client].uplink_bps
            leaves_s = max(leaves_s, last.leaves_s + busy_s)
        mail = Mail(flight.number, self.num_ended, result.message_bits, leaves_s, receivers, outputs.message)
        peer.mail = (*self.still_needed(flight.client), mail)
        self.bill(flight.client, receivers, mail.bits, result.num_values)

    def staleness(self, mail: Mail) -> float:
        """The age of a message in rounds."""
        return (self.num_ended - mail.end) / len(self.peers)

    def share(self, mail: Mail) -> float | None:
        """The share of its weight that a message keeps."""
        return checked(
            self.schedule.scale, "a number in [0, 1], or None", lambda share: share is None or 0 <= share <= 1
        )(self.staleness(mail))

    def has_arrived(self, mail: Mail, sender: int, receiver: int) -> bool:
        """Whether a receiver has the message."""
        place = bisect_left(mail.receivers, receiver)
        if mail.receivers[place : place + 1] != (receiver,):
            return False
        up_s = (place + 1) * mail.bits / self.traits[sender].uplink_bps
        down_s = mail.bits / self.traits[receiver].downlink_bps
        return moment(mail.leaves_s + up_s + self.schedule.latency_s + down_s) <= self.second

    def still_needed(self, client: int) -> Sequence[Mail]:
        """The earlier messages of a peer that somebody may still mix, oldest first."""
        needed, reached = list[Mail](), set[int]()
        for mail in reversed(self.peers[client].mail):
            if self.share(mail) is None:
                break
            if not reached.issuperset(mail.receivers):
                needed.append(mail)
            reached |= {receiver for receiver in mail.receivers if self.has_arrived(mail, client, receiver)}
        return needed[::-1]

    def exchange(self, client: int) -> None:
        """Choose what the peer mixes: its own message, and the newest ones of its neighbours that are not too old."""
        peer = self.peers[client]
        if not peer.unmixed:
            return
        peer.unmixed, rest, ages = False, 0.0, list[float]()
        heard: dict[int, tuple[float, Mail]] = {}
        sends = bool(peer.mail) and peer.mail[-1].number == peer.number - 1
        for sender, weight in row(self.weights, client).items() if sends else ():
            mails = reversed(self.peers[sender].mail) if sender != client else ()
            mail = next((mail for mail in mails if self.has_arrived(mail, sender, client)), None)
            share = None if mail is None else self.share(mail)
            if mail is not None and share is not None:
                heard[sender] = (weight * share, mail)
                ages.append(self.staleness(mail))
            rest += weight * (1.0 - (share or 0.0))
        if heard:
            self.note_staleness(client, float(np.mean(ages)))
            if self.current.setup.method.capabilities.include_self:
                heard[client] = (rest, peer.mail[-1])
        self.heard[client] = dict(sorted(heard.items()))

    def flush(self) -> None:
        """Compute the exchanges that wait, in one wave of calls. A call has at most one message of each sender."""
        current, setup = self.current, self.current.setup
        slots = setup.state_slots
        current.run_state = current.run_state.updated(slots, self.states)
        jobs: list[Job] = []
        for messages, receivers in self.without_two_versions():
            rows = {
                client: {sender: weight for sender, (weight, _) in self.heard[client].items()} for client in receivers
            }
            for part in in_calls(rows, current.executor.num_workers, 4 * tree.num_entries(setup.initial)):
                work = replace(
                    mix_job({client: rows[client] for client in part}, self.hearers),
                    numbers={client: self.peers[client].number - 1 for client in part},
                )
                inputs = (
                    *current.run_state.inputs(slots, part),
                    *(messages[sender].message for sender in work.senders),
                )
                jobs.append(Job(work, inputs, len(slots) * len(part), slots.kept(len(part)), setup.together))
        if jobs:
            current.keep(slots, jobs, current.run(jobs))
        self.states, self.heard = {}, {}

    def without_two_versions(self) -> list[tuple[dict[int, Mail], list[int]]]:
        """The peers whose exchanges wait, in groups in which no two mix different messages of one sender; each with the
        group's messages by sender."""
        groups: list[tuple[dict[int, Mail], list[int]]] = []
        for client, heard in self.heard.items():
            mails = {sender: mail for sender, (_, mail) in heard.items()}
            fitting = (group for group in groups if all(group[0].get(key, mail) is mail for key, mail in mails.items()))
            messages, receivers = next(fitting, ({}, []))
            if not receivers:
                groups.append((messages, receivers))
            messages.update(mails)
            receivers.append(client)
        return groups


@dataclass
class Meetings(Wakes):
    """Peers that average models with one neighbour at a time, after each training of their own."""

    meetings: list[tuple[Meeting, Ref]] = field(default_factory=list)
    """The meetings that are not computed yet, with the state of the first peer after its training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        current, setup, everyone = self.current, self.current.setup, range(len(self.peers))
        # A neighbour may change a peer's model before the peer has ever trained.
        new = [client for client in everyone if client not in current.run_state.states]
        states = current.executor.put_all(tree.to_arrays(setup.first_state(client)) for client in new)
        current.run_state = current.run_state.updated(
            setup.state_slots, dict(zip(new, map(ClientOutputs, states), strict=True))
        )
        for client in self.flights:
            self.peers[client].begun = self.peers[client].begun or current.run_state.states[client]
        self.graph = graph_among(setup, self.exchange_of_all)
        ctx = setup.context(current.number, current.inputs.plan, 0, "meet")
        with keyed(setup.seed, client=0, purpose="meet"):
            message = uncompressed(checked_hook(setup.peer_half.message_to_partner)(setup.first_state(0), ctx), ctx)
        self.bits, self.num_values = message_bits(message), num_values(message)

    def begun(self) -> RunState:
        return replace(self.current.run_state, states={client: self.peers[client].begun for client in self.flights})

    def begin(self, client: int) -> None:
        """A peer that begins in the moment of its own meeting has the state that this has left."""
        super().begin(client)
        peer = self.peers[client]
        if peer.begun is None and all(meeting.client != client for meeting, _ in self.meetings):
            self.flush()
            peer.begun = self.current.run_state.states[client]

    def wait(self, client: int) -> None:
        self.flush()
        self.peers[client].begun = None

    def end(self, flight: Flight) -> None:
        """First the end of a peer's training, with which the transfer begins, and then that of the transfer."""
        client, peer = flight.client, self.peers[flight.client]
        delivers = flight.result is not None and flight.result.status is ClientStatus.DELIVERED
        if delivers and peer.partner == NOBODY and (partner := self.drawn_partner(flight)) != NOBODY:
            peer.partner = partner
            ends_s = moment(self.second + self.transfer_s(client, partner))
            self.put(flight._replace(earliest_s=ends_s, ends_s=ends_s))
            return
        result, meeting = self.note(flight), Meeting(client, peer.partner, self.num_ended)
        peer.begun, peer.partner = None, NOBODY
        self.note_staleness(client, float(peer.met))
        peer.met = 0
        if flight.outputs is None or not result.status.keeps_state:
            return
        self.meetings.append((meeting, flight.outputs.state))
        if len(meeting.pair) == 2:
            self.peers[meeting.partner].met += 1
            for sender, receiver in (meeting.pair, meeting.pair[::-1]):
                self.bill(sender, [receiver], self.bits, self.num_values)

    def drawn_partner(self, flight: Flight) -> int:
        """One of the peer's neighbours that are available, at random; `NOBODY` if none is."""
        reachable = self.reachable()
        neighbours = [neighbour for neighbour in row(self.graph, flight.client) if reachable[neighbour]]
        draws = generator(self.current.setup.seed, flight.number, flight.client, "partner")
        return neighbours[draws.integers(len(neighbours))] if neighbours else NOBODY

    def transfer_s(self, client: int, partner: int) -> float:
        """Seconds until both have the other's model."""
        pair = (self.traits[client], self.traits[partner])
        ways = [
            self.bits / sender.uplink_bps + self.bits / receiver.downlink_bps for sender, receiver in (pair, pair[::-1])
        ]
        return max(ways) + self.schedule.latency_s

    def flush(self) -> None:
        """Compute the meetings that wait, in waves in which no peer is in two of them."""
        current, setup = self.current, self.current.setup
        while self.meetings:
            states, busy = current.run_state.states, set[int]()
            waves: tuple[list[tuple[Meeting, Ref]], ...] = ([], [])
            for meeting, trained in self.meetings:
                waves[not busy.isdisjoint(meeting.pair)].append((meeting, trained))
                busy.update(meeting.pair)
            jobs: list[Job] = []
            for places in runs(range(len(waves[0])), current.calls_per_wave):
                part = [waves[0][place] for place in places]
                work = MeetJob(tuple(meeting for meeting, _ in part))
                inputs = tuple(ref for meeting, trained in part for ref in (trained, *map(states.get, meeting.pair)))
                jobs.append(
                    Job(work, inputs, len(work.clients), setup.state_slots.kept(len(work.clients)), setup.together)
                )
            answers = current.run(jobs)
            if any(bits != self.bits for answer in answers for bits in answer.result):
                raise HookError(
                    f"{setup.method.title}.message_to_partner must always return trees of the same size; it returned "
                    f"{self.bits} bits for the first state, and then others"
                )
            current.keep(setup.state_slots, jobs, answers)
            for meeting, _ in waves[0]:
                self.peers[meeting.client].begun = current.run_state.states[meeting.client]
            self.meetings = waves[1]
