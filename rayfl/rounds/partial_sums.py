"""The messages of the clients below a node of the summation tree: their sum, or the packets if these are smaller.

Packets go only to the call that merges two nodes, which adds them. The choice depends on sizes alone. It changes no
bit, because additions follow the tree wherever they are made. Robust means are made of slices of all messages instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from rayfl import gather, tree
from rayfl.compress.base import Message, Opened, message_bits
from rayfl.data.transfer import to_memory
from rayfl.determinism.addition_order import SumNode, add_up, total
from rayfl.errors import naming_round_and_client
from rayfl.gather import Aggregate, RobustMean
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.setup import Setup

NodeAggregates = dict[str, Aggregate]
"""The aggregates of a node, by message name."""


@dataclass(frozen=True)
class Scaled(Opened):
    """A packet whose decoded tree is multiplied by a factor; never sent."""

    factor: float

    @cached_property
    def _decoded(self) -> tree.Tree:
        return tree.scale(self.codec.decode(self.parts), self.factor)


class FromClient(NamedTuple):
    """A message, and its weight in means."""

    client: int
    message: Message
    weight: float

    def scaled(self, factor: float) -> Self:
        """The same with packets that decode to `factor` times their trees; the weight stays."""
        if factor == 1:
            return self
        return self._replace(
            message={name: Scaled(packet.parts, packet.codec, factor) for name, packet in self.message.items()}
        )


@dataclass(frozen=True)
class Added:
    """The sums of a node by message name, as `gather.to_wire` makes them or on the server's device."""

    # Any: see `gather.to_wire`.
    sums: Mapping[str, Any]


@dataclass(frozen=True)
class Packets:
    """The messages of a node by leaf, not added up. Leaves without a message are left out."""

    by_leaf: Mapping[int, FromClient]


Sent = Added | Packets
"""The messages of the clients below a node, added up or as packets."""


class Summing:
    """Adds up messages by the rules of the method's `gather`."""

    def __init__(self, setup: Setup) -> None:
        self.rules = setup.method.gather
        self.relayed, self.device = setup.relayed, setup.device
        self.stays = setup.server_on_device

    def sent(
        self, node: SumNode, next_sent: Callable[[], FromClient | None], round_number: int, packets: bool = False
    ) -> Sent:
        """The messages of a node's clients; `next_sent` returns the next leaf's message, or None if it has none.

        `packets`: return packets instead of sums if the packets are smaller. They are held until they are no longer
        smaller, and added from then on. An error names `round_number` and the client.
        """
        held = dict[int, FromClient]()
        bits = 0
        sizes = dict.fromkeys(self.rules, 0)
        asked = node[0]
        are_smaller = packets
        while are_smaller and asked < node[1]:
            from_client = next_sent()
            if from_client is not None:
                held[asked] = from_client._replace(message=self._gathered(from_client.message))
                bits += message_bits(held[asked].message)
                for name, packet in held[asked].message.items():
                    sizes[name] = self.rules[name].sum_bytes(sizes[name], packet)
                # Empty messages are sent as packets, too.
                are_smaller = bits < 8 * sum(sizes.values()) or not bits
            asked += 1
        if are_smaller:
            return Packets({leaf: written(from_client, round_number) for leaf, from_client in held.items()})

        def add(sums: NodeAggregates, leaf: int) -> NodeAggregates:
            from_client = held.pop(leaf, None) if leaf < asked else next_sent()
            if from_client is None:
                return sums
            with naming_round_and_client(round_number, from_client.client):
                return self._add(sums, from_client)

        sums = add_up(node, self._empty, add, merged)
        return Added(sums) if self.stays else on_wire(self._in_memory(sums))

    def summed(self, root: SumNode, parts: Mapping[SumNode, Sent]) -> NodeAggregates:
        """The sums of a node, from those of nodes that cover it; `parts` is not changed."""
        return total(root, {node: self._opened(node, part) for node, part in parts.items()}, joined, merged)

    def _opened(self, node: SumNode, part: Sent) -> NodeAggregates:
        if isinstance(part, Added):
            return {name: gather.from_wire(aggregate) for name, aggregate in part.sums.items()}

        def add(sums: NodeAggregates, leaf: int) -> NodeAggregates:
            from_client = part.by_leaf.get(leaf)
            return sums if from_client is None else self._add(sums, from_client)

        return add_up(node, self._empty, add, merged)

    def _in_memory(self, sums: NodeAggregates) -> NodeAggregates:
        """The sums in main memory; those on the device are copied together."""
        if self.device.type == "cpu":
            return sums
        trees = to_memory({name: (aggregate.sum, aggregate.weights) for name, aggregate in sums.items()}, self.device)
        return {
            name: replace(aggregate, sums=(trees[name][0],), weights=trees[name][1]) for name, aggregate in sums.items()
        }

    def _gathered(self, message: Message) -> Message:
        """The packets that are added up; the others are only billed, or forwarded."""
        return {name: packet for name, packet in message.items() if name in self.rules and name not in self.relayed}

    def _empty(self) -> NodeAggregates:
        return {name: rule.empty() for name, rule in self.rules.items()}

    def _add(self, sums: NodeAggregates, from_client: FromClient) -> NodeAggregates:
        """Add a client's message to the sums."""
        for name, packet in self._gathered(from_client.message).items():
            sums[name] = self.rules[name].add(sums[name], packet, from_client.weight, from_client.client)
        return sums


def written(from_client: FromClient, round_number: int) -> FromClient:
    """The same message, with every packet encoded into its buffers."""
    with naming_round_and_client(round_number, from_client.client):
        return from_client._replace(message={name: packet.written() for name, packet in from_client.message.items()})


def merged(a: NodeAggregates, b: NodeAggregates) -> NodeAggregates:
    """Two nodes' sums by message name, in the memory of the first."""
    return {name: a[name].gather.merge(a[name], b[name]) for name in a}


def joined(a: NodeAggregates, b: NodeAggregates) -> NodeAggregates:
    """Two nodes' sums by message name, in new memory."""
    return {name: a[name].gather.joined(a[name], b[name]) for name in a}


def on_wire(sums: NodeAggregates) -> Added:
    """Sums with numpy arrays in place of tensors."""
    return Added({name: gather.to_wire(aggregate) for name, aggregate in sums.items()})


def robust_slice(
    rule: RobustMean, rows: torch.Tensor, decision: np.ndarray | None
) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """What a robust mean measures on a slice of all messages, float32 [n, slice], or the slice of its result."""
    if rule.measures and decision is None:
        measure = checked(
            rule.measure,
            "finite numbers, in a shape that does not depend on the slice",
            lambda measured: np.isfinite(measured).all() and np.shape(measured) == np.shape(rule.measure(rows[:, :1])),
        )
        return measure(rows), []
    combine = checked(
        rule.combine,
        f"the result's slice, {rows.shape[1]} finite numbers in float32",
        lambda combined: (combined.shape, combined.dtype) == (rows.shape[1:], rows.dtype) and combined.isfinite().all(),
    )
    return None, [combine(rows, decision).numpy()]
