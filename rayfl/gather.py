"""Gather: the rules by which the messages of many senders become one `Aggregate`.

Messages are added in the senders' order and merged in a fixed tree (`determinism/addition_order.py`), because the order
of additions decides the bits. Each entry is multiplied by the weight and rounded before it is added, also the first.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import Packet, decoded_bytes
from rayfl.compress.dense import blocks, plain
from rayfl.data.transfer import to_device
from rayfl.errors import RayflError


class Handle(Protocol):
    """A packet that has not been fetched yet, for example from the object store."""

    @abstractmethod
    def open(self) -> Packet:
        """Fetch the packet."""


@dataclass(frozen=True)
class Aggregate:
    """All that arrived under one message name.

    `sums`: weighted sums of decoded messages, which `sum` adds up when it is first read; `weight`: total weight;
    `weights`: total weight of every entry, for ElementwiseMean; `count`: number of messages; `items`: by sender, for
    Collect and Relay. `known`: the result, if the sums that it was made of have been dropped.
    """

    gather: "Gather"
    sums: tuple[tree.Tree, ...] = ()
    weight: float = 0.0
    weights: tree.Tree = field(default_factory=dict)
    count: int = 0
    items: dict[int, tree.Tree | Handle] = field(default_factory=dict)
    known: tree.Tree | None = None

    @property
    def result(self) -> tree.Tree:
        """The mean or the sum, by the gather's rule; {} when nothing arrived."""
        return self.gather.result(self) if self.known is None else self.known

    @cached_property
    def sum(self) -> tree.Tree:
        """Weighted sum of the decoded messages; {} when nothing arrived."""
        return reduce(tree.add, self.sums) if self.sums else {}

    def taken_from(self, x: tree.Tree) -> tree.Tree:
        """x - result. A mean is divided and subtracted a block at a time, and is never in memory as a whole."""
        in_blocks = type(self.gather) is WeightedMean and self.known is None and not tree.at_once(x)
        if not in_blocks or not all(map(plain, (x, *self.sums))):
            return tree.sub(x, self.result)
        factor = 1.0 / self.weight
        return {name: _less_mean(tensor, [part[name] for part in self.sums], factor) for name, tensor in x.items()}

    def on_device(self, device: torch.device) -> "Aggregate":
        """The same with its sums and its result on `device`."""
        sums, weights, known = (to_device(part or {}, device) for part in (self.sums, self.weights, self.known))
        return replace(self, sums=tuple(sums), weights=weights, known=known or None)

    def copied(self) -> "Aggregate":
        """A copy, which `Gather.merge` may change."""
        sums, weights = alone(tree.map(torch.clone, self.sum)), tree.map(torch.clone, self.weights)
        return replace(self, sums=sums, weights=weights, items=dict(self.items))

    def scaled(self, factors: tree.Tree) -> "Aggregate":
        """The aggregate as if every message had been multiplied by `factors`, entry by entry.

        Raise RayflError for packets that are not decoded (Relay).
        """
        if any(not isinstance(item, dict) for item in self.items.values()):
            raise RayflError("packets that the server relays unopened cannot be rescaled; gather them with Collect")
        items = {sender: tree.mul(item, factors) for sender, item in self.items.items() if isinstance(item, dict)}
        known = tree.mul(self.known, factors) if self.known else self.known
        return replace(self, sums=alone(tree.mul(self.sum, factors)), items=items, known=known)


Received = Mapping[str, Aggregate]
"""What arrived in a round, by message name."""


class Gather(ABC):
    """A rule for adding messages up. `entrywise`: no entry of its result depends on another entry of the messages."""

    entrywise: ClassVar[bool] = False

    def empty(self) -> Aggregate:
        """Nothing arrived."""
        return Aggregate(self)

    @abstractmethod
    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        """Add one message to `total`, whose memory may be reused."""

    def merge(self, a: Aggregate, b: Aggregate) -> Aggregate:
        """Add `b` to `a`, whose memory may be reused; `b` is not changed."""
        a.items.update(b.items)
        sums, weights = alone(_merged(a.sum, b.sum)), _merged(a.weights, b.weights)
        return Aggregate(a.gather, sums, a.weight + b.weight, weights, a.count + b.count, a.items)

    def joined(self, a: Aggregate, b: Aggregate) -> Aggregate:
        """Add both in new memory; neither is changed."""
        return self.merge(a.copied(), b)

    def sum_bytes(self, before: int, packet: Packet) -> int:
        """Bytes of a sum of `before` bytes after one more packet; 0 if the packet's codec does not tell its shapes."""
        return max(before, decoded_bytes(packet))

    @abstractmethod
    def result(self, total: Aggregate) -> tree.Tree:
        """The mean or the sum of the messages, which most methods use."""


@dataclass(frozen=True)
class Sum(Gather):
    """sum_i m_i, whatever the weights."""

    entrywise = True

    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        return self._added(total, packet, 1.0, weight)

    def _added(self, total: Aggregate, packet: Packet, factor: float, weight: float) -> Aggregate:
        """`total` and `factor` times the message."""
        sums = (_plus(total.sum, packet, factor),)
        return Aggregate(total.gather, sums, total.weight + weight, total.weights, total.count + 1, total.items)

    def joined(self, a: Aggregate, b: Aggregate) -> Aggregate:
        if not (a.sum and b.sum and type(self).merge is Gather.merge):
            return super().joined(a, b)
        # Both are added when somebody reads the sum.
        return Aggregate(a.gather, (a.sum, b.sum), a.weight + b.weight, count=a.count + b.count)

    def result(self, total: Aggregate) -> tree.Tree:
        return total.sum


@dataclass(frozen=True)
class WeightedSum(Sum):
    """sum_i w_i m_i."""

    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        return self._added(total, packet, weight, weight)


@dataclass(frozen=True)
class WeightedMean(WeightedSum):
    """sum_i w_i m_i / sum_i w_i, of the sum of the w_i m_i."""

    def result(self, total: Aggregate) -> tree.Tree:
        return tree.scale(total.sum, 1.0 / total.weight) if total.count else {}


@dataclass(frozen=True)
class ElementwiseMean(Gather):
    """Each entry's weighted mean over the clients that sent it; 0 if none did.

    `counted="sent"`: an entry counts where the packet carries it, exact zeros included (masks);
    `counted="nonzero"`: it counts if it is not zero (FedPSE's EWA).
    """

    entrywise = True
    counted: Literal["sent", "nonzero"] = "sent"

    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        sent = self.counted == "sent"
        present = packet.presence() if sent else tree.map(lambda t: (t != 0).to(torch.float32), packet.decode())
        weights = total.weights if total.count else tree.zeros_like(present)
        for name, tensor in weights.items():
            # The products are exact: present is 1 or 0.
            tensor.add_(present[name], alpha=weight)
        return Aggregate(self, (_plus(total.sum, packet, weight),), total.weight + weight, weights, total.count + 1)

    def sum_bytes(self, before: int, packet: Packet) -> int:
        return max(before, 2 * decoded_bytes(packet))

    def result(self, total: Aggregate) -> tree.Tree:
        if not total.count:
            return {}
        # If nobody sent an entry, both are 0. Subnormal numbers may be flushed to 0, so the divisor is a normal number.
        least = torch.finfo(torch.float32).tiny
        return {name: value / total.weights[name].clamp(min=least) for name, value in total.sum.items()}


@dataclass(frozen=True)
class Collect(Gather):
    """Keeps every decoded message in `items` by sender, in ascending order."""

    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        total.items[sender] = packet.decode()
        return replace(total, weight=total.weight + weight, count=total.count + 1)

    def sum_bytes(self, before: int, packet: Packet) -> int:
        return before + decoded_bytes(packet)

    def result(self, total: Aggregate) -> tree.Tree:
        return {}


@dataclass(frozen=True)
class Relay(Collect):
    """Keeps every packet undecoded, as a `Handle` by sender in `items`, so that the server can forward it."""


CENTER = "robust center"
"""The server state's entry with the last result, by message name, of rules that keep a center."""


class RobustMean(Collect):
    """A mean of messages that the engine keeps until all have arrived, made slice by slice on the workers.

    As an aggregate it counts messages, whose weights must be equal, and collects none; `known` is then its result.
    """

    measures: ClassVar[bool] = False
    """Whether the rule reads the messages twice, the first time for `decide`."""
    keeps_center: ClassVar[bool] = False
    """Whether the last row of `rows` is the result of the round before, at first zeros."""

    def measure(self, rows: torch.Tensor) -> np.ndarray:
        """Statistics of a slice of the messages, float32 [n, slice], that add up over slices: by default the inner
        products of all pairs, float64 [n, n]."""
        return (rows.double() @ rows.double().T).numpy()

    def decide(self, statistics: np.ndarray) -> np.ndarray:
        """The array that `combine` needs, from the sum of the statistics of all slices."""
        return statistics

    @abstractmethod
    def combine(self, rows: torch.Tensor, decision: np.ndarray | None) -> torch.Tensor:
        """The result's slice, float32 [slice], from those of the messages, float32 [n, slice] by ascending client."""

    def decide_among(self, statistics: np.ndarray, weights: np.ndarray, own_row: int) -> np.ndarray:
        """`decide` for a peer, from the mixing weights of its neighbours' messages and its own, which is number
        `own_row`, [n]; by default without regard to them."""
        return self.decide(statistics)

    def combine_among(self, rows: torch.Tensor, decision: np.ndarray | None, own_row: int) -> torch.Tensor:
        """`combine` for a peer, whose own message is in row `own_row`; by default a row like the others."""
        return self.combine(rows, decision)

    def add(self, total: Aggregate, packet: Packet, weight: float, sender: int) -> Aggregate:
        if total.count and total.weight != weight * total.count:
            raise RayflError("a robust mean cannot trust weights that clients send, and these are not all equal")
        return replace(total, weight=total.weight + weight, count=total.count + 1)


# Any: a tree, or its arrays in transit.
def alone(added: Any) -> tuple[Any, ...]:
    """`Aggregate.sums` that are one tree; none if it is empty."""
    return (added,) if added else ()


def _plus(total: tree.Tree, packet: Packet, weight: float) -> tree.Tree:
    if not total:
        # `times` makes no -0.0, and no sum becomes -0.0 later; so entries that a packet leaves out need no addition.
        return packet.times(weight)
    packet.add_to(total, weight)
    return total


@torch.no_grad()
def _less_mean(x: torch.Tensor, parts: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """x - factor * (the sum of `parts`), rounded after each operation."""
    result = torch.empty_like(x)
    for into, before, first, *others in zip(*map(blocks, (result, x, *parts)), strict=True):
        torch.sub(before, reduce(torch.add, others, first).mul(factor), out=into)
    return result


def _merged(a: tree.Tree, b: tree.Tree) -> tree.Tree:
    """`a` plus `b`, in the memory of `a`."""
    if not a:
        return tree.map(torch.clone, b)
    if tree.at_once(a) and tree.at_once(b):
        tree.private._foreach_add_(tree.tensors(a, b), tree.tensors(b, b))
        return a
    for name, tensor in b.items():
        # One may be on a GPU and the other not, if only some clients' uplinks are dense.
        a[name].add_(tensor.to(a[name].device))
    return a


# Any: in transit the record has numpy arrays instead of tensors.
def to_wire(total: Aggregate) -> Any:
    """An aggregate with numpy arrays in place of tensors."""
    items = {sender: tree.to_arrays(item) for sender, item in total.items.items() if isinstance(item, dict)}
    return replace(total, sums=alone(tree.to_arrays(total.sum)), weights=tree.to_arrays(total.weights), items=items)


def from_wire(total: Any) -> Aggregate:
    """The inverse of `to_wire`; the tensors share the arrays' memory."""
    items = {sender: tree.to_tensors(item) for sender, item in total.items.items()}
    return replace(total, sums=alone(tree.to_tensors(total.sum)), weights=tree.to_tensors(total.weights), items=items)
