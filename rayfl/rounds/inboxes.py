"""Peers on their own clocks that hear all their neighbours: of each, the newest message that has arrived.

A message leaves when its sender's training has ended and the sender's earlier messages have left, one copy after
another. Nothing happens when it arrives: a peer looks for messages when it mixes. What has not arrived, or is too old,
is left out, and the peer itself gets its weight. A peer that hears nobody goes on with its own model.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from rayfl import tree
from rayfl.population.client import ClientStatus
from rayfl.rounds.air import Flight, Mail
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.executor import Job
from rayfl.rounds.peer_exchange import in_calls, mix_job, row, weighted_graph
from rayfl.rounds.simulated_clock import moment
from rayfl.rounds.wakes import Wakes
from rayfl.rounds.worker_jobs import ClientOutputs


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
        self.heard[client] = heard

    def flush(self) -> None:
        """Compute the exchanges that wait, in one wave of calls. A call has at most one message of each sender."""
        current, setup, heard = self.current, self.current.setup, self.heard
        slots, present = setup.state_slots, self.exchange_of_all.present
        current.run_state = current.run_state.updated(slots, self.states)
        jobs: list[Job] = []
        for messages, receivers in self.without_two_versions():
            links = [(client, *link) for client in receivers for link in heard[client].items()]
            places = np.array([link[:2] for link in links], dtype=np.int64).reshape(-1, 2)
            weights = np.array([weight for *_, (weight, _) in links], dtype=np.float64)
            matrix = scipy.sparse.csr_array((weights, (*places.T,)), shape=(len(present), len(present)))
            for part in in_calls(receivers, matrix, current.executor.num_workers, 4 * tree.num_entries(setup.initial)):
                numbers = {client: self.peers[client].number - 1 for client in part}
                work = replace(mix_job(part, matrix, present, self.hearers), numbers=numbers)
                mails = (messages[sender].message for sender in work.senders)
                inputs = (*current.run_state.inputs(slots, part), *mails)
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
            fits = (all(group.get(sender, mail) is mail for sender, mail in mails.items()) for group, _ in groups)
            place = next((place for place, is_fitting in enumerate(fits) if is_fitting), len(groups))
            if place == len(groups):
                groups.append(({}, []))
            groups[place][0].update(mails)
            groups[place][1].append(client)
        return groups
