"""What peers on their own clocks do in a round of the records, which is as many trainings as there are peers.

A peer wakes when its training ends: it sends its message, or averages models with a neighbour
(own_clocks.py), and begins the next training. flights.py computes trainings in waves. An exchange is computed when
something needs its result, together with all others that wait. At one moment trainings end by ascending peer, and then
peers mix and begin. A round closes at the moment at which its last training ends, after all that happens then.

Random draws of a peer's work are keyed by the number of its training, counted by the peer itself. Everything else that
depends on a round (its plan, its graph, learning rates) follows the rounds of the records.

A peer that is not available does not begin. If no peer is under way, the round closes when other peers are available.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rayfl.errors import RayflError
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds.flights import UnderWay
from rayfl.rounds.ledger import comm
from rayfl.rounds.run_state import Clocks, CurrentRound, Flight, Peer
from rayfl.rounds.simulated_clock import moment
from rayfl.rounds.worker_jobs import ClientResult, RoundInputs
from rayfl.schedules.base import NOT_YET, PeerSchedule
from rayfl.topology.mixing import Exchange


@dataclass
class Wakes(UnderWay):
    """A round while it is simulated; the fields are those of `Clocks`."""

    peers: list[Peer]
    num_ended: int
    done: int

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.peers)
        self.idle = {*range(count)} - self.flights.keys()
        self.looking = {*self.idle}
        """The idle peers that may be able to begin at this second."""
        self.busy_s = 0.0
        self.traits = [self.current.setup.population.traits(client) for client in range(count)]
        self.sent, self.received = (np.zeros((2, count), np.int64) for _ in range(2))
        """Bits, and numbers, that peers have sent and received, int64 [2, n]."""

    @classmethod
    def at(cls, current: CurrentRound) -> Self:
        """The peers as the last round has left them."""
        before = current.run_state.clocks
        peers = [replace(peer) for peer in before.peers] or [Peer() for _ in range(current.setup.num_clients)]
        return cls(current, before.second, dict(before.flights), peers, before.num_ended, before.done)

    @property
    def schedule(self) -> PeerSchedule:
        """The experiment's schedule."""
        schedule = self.current.setup.schedule
        assert isinstance(schedule, PeerSchedule), "refused by `check`"
        return schedule

    @property
    def exchange_of_all(self) -> Exchange:
        """The round's exchange if everybody is there."""
        return self.current.setup.exchange(self.current.number, np.full(len(self.peers), True))

    def play(self) -> None:
        """Simulate until the round closes."""
        population = self.current.setup.population
        while True:
            reachable, slot = self.reachable(), population.slot(self.second)
            ready = sorted(client for client in self.looking if reachable[client])
            for client in ready:
                self.exchange(client)
            if self.done >= len(self.peers):
                break
            for client in ready:
                self.begin(client)
            for client in self.looking - {*ready}:
                self.wait(client)
            opens_s = population.next_slot_s(self.second) if self.idle else NOT_YET
            first = self.first(opens_s)
            self.second = opens_s if first is None else min(first.ends_s, opens_s)
            if first is None:
                break
            self.looking = set() if population.slot(self.second) == slot else {*self.idle}
            while first is not None and first.ends_s <= self.second:
                del self.flights[first.client]
                self.end(first)
                first = self.first(self.second)
        self.close()

    def begin(self, client: int) -> None:
        """Let a peer begin its next training."""
        number = self.peers[client].number
        self.idle.remove(client)
        self.start(number, self.second, ClientResult(client, self.status(number, client)))

    def exchange(self, client: int) -> None:
        """Called before a peer begins: let it mix what has arrived."""

    def wait(self, client: int) -> None:
        """Called for a peer that cannot begin now."""

    @abstractmethod
    def end(self, flight: Flight) -> None:
        """End a training."""

    @abstractmethod
    def flush(self) -> None:
        """Compute the exchanges that wait."""

    def train(self) -> None:
        self.flush()
        super().train()

    def inputs_of(self, version: int) -> RoundInputs:
        return RoundInputs(version, self.current.setup.plan(version))

    def note(self, flight: Flight) -> ClientResult:
        """Count a training that has ended, and add its result to those of the round; returns it."""
        client, peer, result = flight.client, self.peers[flight.client], flight.result
        assert result is not None, "`first` returns trained flights"
        if flight.ends_s <= flight.began_s:
            raise RayflError(
                f"a training of peer {client} takes no simulated time at second {flight.began_s:g}, so that its clock "
                "stands still; give it train examples, or lower clients.examples_per_s"
            )
        peer.number += 1
        self.num_ended += 1
        self.done += 1
        self.idle.add(client)
        self.looking.add(client)
        self.busy_s += flight.ends_s - max(flight.began_s, self.began_s)
        self.add(self.timed(flight, result))
        setup = self.current.setup
        is_evaluated = setup.keeps_models and setup.evaluation.by_client and client in setup.evaluated_clients
        # The worker returns None for a model that is never evaluated, and a reference does not show it.
        if flight.outputs is not None and is_evaluated:
            peer.model, peer.trained = flight.outputs.model, (flight.version, flight.number)
        return result

    def add(self, result: ClientResult) -> None:
        """Add a part to what a peer has done in the round."""
        results = self.current.ledger.results
        earlier = results.get(result.client)
        results[result.client] = result if earlier is None else earlier.followed(result)

    def note_staleness(self, client: int, staleness: float) -> None:
        """Record how stale what a peer has mixed was."""
        self.add(ClientResult(client, ClientStatus.AT_WORK, metrics={"flight/staleness": staleness}))

    def bill(self, sender: int, receivers: Sequence[int], bits: int, values: int) -> None:
        """Bill copies of a message on both ends."""
        size = np.array([bits, values])
        self.sent[:, sender] += size * len(receivers)
        self.received[:, receivers] += size[:, None]

    def close(self) -> None:
        """End the round: compute what is left, evaluate, fill the ledger, and keep the flights under way."""
        self.flush()
        current, ledger, everyone = self.current, self.current.ledger, range(len(self.peers))
        active = [
            client
            for client in everyone
            if client in ledger.results or client in self.flights or self.received[0, client]
        ]
        for client in active:
            up, (down, values) = int(self.sent[0, client]), self.received[:, client].tolist()
            self.add(
                ClientResult(client, ClientStatus.AT_WORK, billed_bits=up, downlink_bits=down, num_received=values)
            )
        ledger.participation = Participation(
            {client: ledger.results[client].status for client in active}, np.flatnonzero(~self.reachable())
        )
        models = {client: peer.model for client, peer in enumerate(self.peers) if peer.model is not None}
        self.evaluate(models, {client: self.peers[client].trained for client in models})
        ledger.simulated_s = self.second - self.began_s
        self.busy_s += sum(self.second - max(flight.began_s, self.began_s) for flight in self.flights.values())
        if ledger.simulated_s:
            ledger.metrics["flight/idle_share"] = max(
                0.0, 1.0 - moment(self.busy_s / ledger.simulated_s / len(self.peers))
            )
        ledger.metrics |= comm(self.received[1], self.sent[1])
        for client, peer in enumerate(self.peers):
            if peer.begun is current.run_state.states.get(client):
                peer.begun = None
        current.run_state = replace(
            current.run_state,
            clocks=Clocks(self.second, self.num_ended, max(0, self.done - len(self.peers)), self.flights, self.peers),
        )
