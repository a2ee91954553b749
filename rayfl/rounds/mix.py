"""Computes what the receivers of an exchange gather: weighted sums or robust means of their neighbours' messages.

Messages are read in pieces. A piece is decoded once, and added for all receivers while it is in the processor's cache.
Only the results of the sums are kept. Additions follow the senders' order and are made entry by entry, so that neither
the pieces nor the other receivers of a call can change a bit. Rules that use distances decode messages twice.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from rayfl.compress.base import LARGE, Divisible, Message, Packet, Shapes, cuts
from rayfl.gather import Aggregate, Gather, RobustMean
from rayfl.rounds.worker_jobs import MixJob
from rayfl.tree import Tree

Row = Mapping[int, float]
"""A receiver's weights by sender."""


def gather_rows(
    rules: Mapping[str, Gather], job: MixJob, messages: Mapping[int, Message]
) -> dict[int, dict[str, Aggregate]]:
    """The aggregates of each receiver by message name; {} for an empty row. Receivers with equal rows share them."""
    # A robust rule compares the messages of a row with the receiver's own.
    robust = any(isinstance(rule, RobustMean) for rule in rules.values())
    keys = {c: (c if robust else None, tuple(sorted(row.items()))) for c, row in job.rows.items()}
    rows = {keys[client]: row for client, row in job.rows.items() if row}
    shares: dict[tuple[int | None, tuple[tuple[int, float], ...]], dict[str, Aggregate]]
    shares = {key: {} for key in keys.values()}
    for name, rule in rules.items():
        packets = {sender: messages[sender][name] for sender in sorted(job.senders) if name in messages[sender]}
        if isinstance(rule, RobustMean):
            totals = robust_rows(rule, packets, list(rows.values()), [key[0] or 0 for key in rows])
        else:
            totals = gathered(rule, packets, list(rows.values()))
        for key, total in zip(rows, totals, strict=True):
            shares[key][name] = total
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
            weights = np.array([rows[index][sender] for sender in senders[index]])
            decisions[index] = rule.decide_among(totals[index], weights, own_rows[index])
    parts: list[dict[str, list[torch.Tensor]]] = [{} for _ in rows]
    for name, flats in slices(packets):
        for index in heard:
            stacked = torch.stack([flats[sender] for sender in senders[index]])
            combined = rule.combine_among(stacked, decisions[index], own_rows[index])
            parts[index].setdefault(name, []).append(combined)
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
    codecs = [packet.codec for packet in packets]
    shapes = {codec.shapes if isinstance(codec, Divisible) else None for codec in codecs}
    return shapes.pop() if len(shapes) == 1 else None


def in_pieces(packets: Mapping[int, Packet]) -> Iterator[dict[int, Packet]]:
    """Yield the first piece of every packet by sender, then the second pieces, and so on."""
    pieces = [packet.pieces() for packet in packets.values()]
    for each in zip(*pieces, strict=True):
        yield dict(zip(packets, each, strict=True))


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
