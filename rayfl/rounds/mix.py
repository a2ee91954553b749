"""A worker's jobs of peers, and what receivers gather: weighted sums or robust means of their neighbours' messages.

Messages are read in pieces. A piece is decoded once, and added for all receivers while it is in the processor's cache.
Only the results of the sums are kept. Additions follow the senders' order and are made entry by entry, so that neither
the pieces nor the other receivers of a call can change a bit. Rules that use distances decode messages twice.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rayfl.compress.base import LARGE, Divisible, Message, Packet, Shapes, cuts, message_bits
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import naming_round_and_client
from rayfl.gather import Aggregate, Gather, RobustMean
from rayfl.methods.base import uncompressed
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.client_round import JobInputs, encode_upload, with_memory, without_memory
from rayfl.rounds.worker_jobs import ClientOutputs, RoundInputs, WorkerJob, num_values
from rayfl.tree import Tree

Row = Mapping[int, float]
"""A receiver's weights by sender."""


@dataclass(frozen=True)
class MixJob(WorkerJob):
    """Mixes messages into receivers, by rows {sender: weight}. Inputs: the receivers' states, then the messages, or the
    outputs of `SendJob`s if each link has a message of its own.

    `listeners`: by receiver, the peers that receive from it. `numbers`: by receiver, the number that keys its random
    draws instead of the round's; {} in rounds. Outputs: the receivers' new states.
    """

    rows: Mapping[int, Mapping[int, float]]
    senders: tuple[int, ...]
    listeners: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    numbers: Mapping[int, int] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[int, ...]:
        """The receivers."""
        return tuple(self.rows)


LinkSize = tuple[int, int, int, int]
"""The sender and the receiver of a link, and the bits and the numbers of its message."""


@dataclass(frozen=True)
class SendJob(WorkerJob):
    """Makes a message for each listener of each client. Inputs: the clients' states.

    `heard`: by client, the peers that it receives from. `calls`: the receivers of each mixing call. Result: a
    `LinkSize` for each message. Outputs: for each mixing call, {sender: {receiver: message}}.
    """

    listeners: Mapping[int, tuple[int, ...]]
    heard: Mapping[int, tuple[int, ...]]
    calls: tuple[tuple[int, ...], ...]

    @property
    def clients(self) -> tuple[int, ...]:
        """The senders."""
        return tuple(self.listeners)


class Meeting(NamedTuple):
    """A peer that has trained, the neighbour with which it averages models (`NOBODY`: it is alone), and the number that
    keys the random draws of both."""

    client: int
    partner: int
    number: int

    @property
    def pair(self) -> tuple[int, ...]:
        """Those who take part."""
        return (self.client,) if self.partner == NOBODY else (self.client, self.partner)


@dataclass(frozen=True)
class MeetJob(WorkerJob):
    """Lets pairs of peers average their models.

    Inputs of each meeting: the first peer's state after its training, then the present states of the pair. Outputs: the
    pair's new states.
    """

    meetings: tuple[Meeting, ...]

    @property
    def clients(self) -> tuple[int, ...]:
        """All who take part; no peer is in two meetings of a job."""
        return tuple(client for meeting in self.meetings for client in meeting.pair)


def gather_rows(
    rules: Mapping[str, Gather], job: MixJob, messages: Mapping[int, Message]
) -> dict[int, dict[str, Aggregate]]:
    """The aggregates of each receiver by message name; {} for an empty row. Receivers with equal rows share them."""
    # A robust rule compares the messages of a row with the receiver's own.
    robust = any(isinstance(rule, RobustMean) for rule in rules.values())
    keys = {c: (c if robust else None, tuple(sorted(row.items()))) for c, row in job.rows.items()}
    rows = {keys[client]: row for client, row in job.rows.items() if row}
    shares = {key: dict[str, Aggregate]() for key in keys.values()}
    for name, rule in rules.items():
        packets = {sender: messages[sender][name] for sender in sorted(job.senders) if name in messages[sender]}
        weights, receivers = list(rows.values()), [key[0] or 0 for key in rows]
        totals = (
            robust_rows(rule, packets, weights, receivers)
            if isinstance(rule, RobustMean)
            else gathered(rule, packets, weights)
        )
        for row, total in zip(rows, totals, strict=True):
            shares[row][name] = total
    return {client: shares[key] for client, key in keys.items()}


def gather_links(
    rules: Mapping[str, Gather], row: Row, receiver: int, sent: Mapping[int, Mapping[int, Message]]
) -> dict[str, Aggregate]:
    """The aggregates of one receiver by message name, from messages by sender and receiver; {} for an empty row."""
    messages = {sender: by_receiver[receiver] for sender, by_receiver in sent.items() if receiver in by_receiver}
    heard = {sender: weight for sender, weight in row.items() if sender in messages}
    return gather_rows(rules, MixJob({receiver: heard}, tuple(messages)), messages)[receiver] if row else {}


def gathered(rule: Gather, packets: Mapping[int, Packet], rows: Sequence[Row]) -> list[Aggregate]:
    """The aggregate for each row, added in the order of the packets; an entrywise rule keeps only the result."""
    shapes = common_shapes(list(packets.values())) if rule.entrywise else None
    if shapes is None:
        totals = added(rule, packets, rows)
        if rule.entrywise:
            for index, total in enumerate(totals):
                totals[index] = keep_result_only(total, total.result)
        return totals
    totals = [rule.empty() for _ in rows]
    results: list[Tree] = [{name: blank(shape) for name, shape in shapes} for _ in rows]
    for (name, first, last), pieces in zip(cuts(shapes), in_pieces(packets), strict=True):
        totals = added(rule, pieces, rows)
        for total, result in zip(totals, results, strict=True):
            if total.count:
                result[name].view(-1)[first:last] = total.result[name]
    return [
        keep_result_only(total, result if total.count else {}) for total, result in zip(totals, results, strict=True)
    ]


def added(rule: Gather, packets: Mapping[int, Packet], rows: Sequence[Row]) -> list[Aggregate]:
    """Add the packets up for each row, and decode every packet once."""
    totals = [rule.empty() for _ in rows]
    hearers: dict[int, list[tuple[int, float]]] = {}
    for index, row in enumerate(rows):
        for sender, weight in row.items():
            hearers.setdefault(sender, []).append((index, weight))
    for sender, packet in packets.items():
        packet = packet.opened()
        for index, weight in hearers.get(sender, ()):
            totals[index] = rule.add(totals[index], packet, weight, sender)
    return totals


def robust_rows(
    rule: RobustMean, packets: Mapping[int, Packet], rows: Sequence[Row], receivers: Sequence[int]
) -> list[Aggregate]:
    """The aggregate for each row {sender: weight} of a receiver, whose own message is the rule's reference."""
    senders = [[sender for sender in packets if sender in row] for row in rows]
    heard = [index for index, row_senders in enumerate(senders) if row_senders]
    own_rows = [senders[index].index(receivers[index]) if index in heard else 0 for index in range(len(rows))]
    decisions: dict[int, np.ndarray | None] = dict.fromkeys(heard)
    if rule.measures:
        totals = dict.fromkeys(heard, np.zeros(()))
        for _, flats in slices(packets):
            for index in heard:
                totals[index] = totals[index] + rule.measure(torch.stack([flats[sender] for sender in senders[index]]))
        for index in heard:
            decisions[index] = rule.decide_among(
                totals[index], np.array([rows[index][sender] for sender in senders[index]]), own_rows[index]
            )
    parts: list[dict[str, list[torch.Tensor]]] = [{} for _ in rows]
    for name, flats in slices(packets):
        for index in heard:
            stacked = torch.stack([flats[sender] for sender in senders[index]])
            parts[index].setdefault(name, []).append(rule.combine_among(stacked, decisions[index], own_rows[index]))
    like = next(iter(packets.values())).decode() if packets else {}
    aggregates = [rule.empty() for _ in rows]
    for index in heard:
        known = {name: torch.cat(flats).view(like[name].shape) for name, flats in parts[index].items()}
        aggregates[index] = Aggregate(rule, weight=1.0, count=len(senders[index]), known=known)
    return aggregates


def slices(packets: Mapping[int, Packet]) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """A tensor's name and a slice of it from each sender's message, [slice], until all tensors have been seen.

    Packets of one shape that can be read in pieces are read so; others tensor by tensor.
    """
    shapes = common_shapes(list(packets.values()))
    if shapes is None:
        decoded = {sender: packet.decode() for sender, packet in packets.items()}
        for name in next(iter(decoded.values()), {}):
            yield name, {sender: message[name].reshape(-1) for sender, message in decoded.items()}
        return
    for (name, _, _), pieces in zip(cuts(shapes), in_pieces(packets), strict=True):
        yield name, {sender: piece.decode()[name].reshape(-1) for sender, piece in pieces.items()}


def common_shapes(packets: Sequence[Packet]) -> Shapes | None:
    """The common shapes of packets that can be read in pieces; None if shapes differ or a packet has no pieces."""
    shapes = {packet.codec.shapes if isinstance(packet.codec, Divisible) else None for packet in packets}
    return shapes.pop() if len(shapes) == 1 else None


def in_pieces(packets: Mapping[int, Packet]) -> Iterator[dict[int, Packet]]:
    """The first piece of every packet by sender, then the second pieces, and so on."""
    rows = zip(*[packet.pieces() for packet in packets.values()], strict=True)
    return (dict(zip(packets, row, strict=True)) for row in rows)


def keep_result_only(total: Aggregate, result: Tree) -> Aggregate:
    """An aggregate that has its result, and no longer the sums."""
    return replace(total, sums=(), weights={}, known=result)


def blank(shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised float32 tensor. A large one has memory pages of its own, which are freed with it.

    The allocator would keep the pages (`prepare_process`) beside the copies of the results in the object store.
    """
    size = math.prod(shape)
    if size < LARGE:
        return torch.empty(shape)
    pages = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


class PeerWork(JobInputs):
    """A worker's jobs of peers: they make messages, and mix those that they receive."""

    def mix(self, job: MixJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[None, Iterable[Any]]:
        """Let every receiver gather its neighbours' messages. Outputs: the receivers' new states."""
        return None, self._mixed(round_inputs, job, inputs) if self.setup.stateful else ()

    def send(
        self, job: SendJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[LinkSize, ...], list[Any]]:
        """Let every sender make a message for each of its listeners."""
        calls = {receiver: index for index, receivers in enumerate(job.calls) for receiver in receivers}
        outputs: list[dict[int, dict[int, Message]]] = [{} for _ in job.calls]
        sizes: list[LinkSize] = []
        for client, kept in ClientOutputs.unpack(self.setup.state_slots, job.clients, inputs).items():
            with naming_round_and_client(round_inputs.round, client):
                ctx = self._keyed(round_inputs, client, "message to")
                ctx = replace(ctx, neighbours_in=job.heard[client], neighbours_out=job.listeners[client])
                state, _ = without_memory(self._state(client, kept))
                for receiver in ctx.neighbours_out:
                    upload = checked_hook(self.setup.peer_half.message_to)(state, receiver, ctx)
                    message, _ = encode_upload(upload, {}, ctx)
                    written = {name: packet.written() for name, packet in message.items()}
                    outputs[calls[receiver]].setdefault(client, {})[receiver] = written
                    sizes.append((client, receiver, message_bits(message), num_values(message)))
        return tuple(sizes), outputs

    def _mixed(self, round_inputs: RoundInputs, job: MixJob, inputs: Sequence[Any]) -> Iterator[Any]:
        slots, receivers = self.setup.state_slots, tuple(job.rows)
        sent = inputs[len(receivers) :]
        if self.setup.peer_half.has_link_messages:
            links = {sender: messages for part in sent for sender, messages in part.items()}
            gathered = {c: gather_links(self.method.gather, row, c, links) for c, row in job.rows.items()}
        else:
            gathered = gather_rows(self.method.gather, job, dict(zip(job.senders, sent, strict=True)))
        shared = self._given.num_noted
        for client, kept in ClientOutputs.unpack(slots, receivers, inputs).items():
            with naming_round_and_client(round_inputs.round, client):
                # By now `do` has returned, so nothing watches.
                ctx = self._keyed(round_inputs, client, "mix", job.numbers.get(client))
                heard = tuple(sender for sender in job.rows[client] if sender != client)
                ctx = replace(ctx, neighbours_in=heard, neighbours_out=job.listeners.get(client, ()))
                state, uplink_memory = without_memory(self._state(client, kept))
                # Removed here, so that sums of this receiver alone are freed.
                state = checked_hook(self.setup.peer_half.mix)(state, self._noted(gathered.pop(client)), ctx)
            # After each receiver, so that no sums are kept for the check.
            self._require_unchanged(round_inputs.round, shared)
            yield from ClientOutputs.of(slots, with_memory(state, uplink_memory), {}).pack(slots)

    def _noted(self, aggregates: dict[str, Aggregate]) -> dict[str, Aggregate]:
        """What has arrived at a receiver, noted as what `mix` must not write to."""
        for name, aggregate in aggregates.items():
            self._given.note(f"what arrived as {name!r}", aggregate.known or {})
        return aggregates

    def meet(self, job: MeetJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Let every pair send each other their present models, and mix them. Result: the bits of each message."""
        left, bits = iter(inputs), list[int]()
        outputs: list[Any] = []
        for meeting in job.meetings:
            trained, *present = (next(left) for _ in range(1 + len(meeting.pair)))
            messages = [
                self._partner_message(round_inputs, client, meeting.number, ClientOutputs(state))
                for client, state in zip(meeting.pair, present, strict=True)
            ]
            bits += map(message_bits, messages)
            row = dict.fromkeys(meeting.pair, 1 / len(meeting.pair))
            others = {client: tuple(peer for peer in meeting.pair if peer != client) for client in meeting.pair}
            mixing = MixJob(
                dict.fromkeys(meeting.pair, row), meeting.pair, others, dict.fromkeys(meeting.pair, meeting.number)
            )
            outputs += self._mixed(round_inputs, mixing, (trained, *present[1:], *messages))
        return bits, outputs

    def _partner_message(self, round_inputs: RoundInputs, client: int, number: int, kept: ClientOutputs) -> Message:
        """What a peer sends a neighbour that it meets."""
        with naming_round_and_client(round_inputs.round, client):
            ctx = self._keyed(round_inputs, client, "meet", number)
            state, _ = without_memory(self._state(client, kept))
            return uncompressed(checked_hook(self.setup.peer_half.message_to_partner)(state, ctx), ctx)
