"""Robust means among peers: a receiver combines its neighbours' messages and its own by a robust rule.

Messages are decoded piece by piece, twice for rules that use distances. A receiver's result depends on the messages of
its own row alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rayfl.compress.base import Divisible, Packet, cuts
from rayfl.gather import Aggregate, RobustMean


def robust_rows(
    rule: RobustMean, packets: Mapping[int, Packet], rows: Sequence[Mapping[int, float]], receivers: Sequence[int]
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
    codecs = [packet.codec for packet in packets.values()]
    shapes = {codec.shapes if isinstance(codec, Divisible) else None for codec in codecs}
    common = shapes.pop() if len(shapes) == 1 else None
    if common is None:
        decoded = {sender: packet.decode() for sender, packet in packets.items()}
        for name in next(iter(decoded.values()), {}):
            yield name, {sender: message[name].reshape(-1) for sender, message in decoded.items()}
        return
    pieces = zip(*(packet.pieces() for packet in packets.values()), strict=True)
    for (name, _, _), parts in zip(cuts(common), pieces, strict=True):
        yield name, {s: part.decode()[name].reshape(-1) for s, part in zip(packets, parts, strict=True)}
