"""Peers on their own clocks that average models with one neighbour at a time, after each training of their own.

First a training ends: with it the transfer of both models begins. When it ends, the two peers average their models of
that moment, and the first one begins its next training from what this leaves. The other one goes on with its training.
"""

from dataclasses import dataclass, field, replace

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.determinism.addition_order import runs
from rayfl.determinism.global_draws import keyed
from rayfl.determinism.seeding import NOBODY, generator
from rayfl.methods.base import uncompressed
from rayfl.population.client import ClientStatus
from rayfl.rounds.air import Flight
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.errors import HookError
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.peer_exchange import graph_among, row
from rayfl.rounds.run_state import RunState
from rayfl.rounds.simulated_clock import moment
from rayfl.rounds.wakes import Wakes
from rayfl.rounds.worker_jobs import ClientOutputs, Meeting, MeetJob, num_values


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
        first = {client: ClientOutputs(state) for client, state in zip(new, states, strict=True)}
        current.run_state = current.run_state.updated(setup.state_slots, first)
        for client in self.flights:
            self.peers[client].begun = self.peers[client].begun or current.run_state.states[client]
        self.graph = graph_among(setup, self.exchange_of_all)
        ctx = setup.context(current.number, current.inputs.plan, 0, "meet")
        with keyed(setup.seed, client=0, purpose="meet"):
            trees = checked_hook(setup.peer_half.message_to_partner)(setup.first_state(0), ctx)
        message = uncompressed(trees, ctx)
        self.bits, self.num_values = message_bits(message), num_values(message)

    def begun(self) -> RunState:
        run_state = self.current.run_state
        return replace(run_state, states={client: self.peers[client].begun for client in self.flights})

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
                refs = [(trained, *map(states.get, meeting.pair)) for meeting, trained in part]
                work = MeetJob(tuple(meeting for meeting, _ in part))
                inputs = tuple(ref for each in refs for ref in each)
                kept = setup.state_slots.kept(len(work.clients))
                jobs.append(Job(work, inputs, len(work.clients), kept, setup.together))
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
