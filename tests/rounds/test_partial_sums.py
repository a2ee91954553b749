"""What a call leaves of its clients' messages: packets where they are together smaller than their sum."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfl import gather
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.determinism.addition_order import add_up
from rayfl.errors import ClientError
from rayfl.gather import Aggregate, Collect, ElementwiseMean, Gather, Sum, WeightedMean
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.partial_sums import Added, FromClient, Packets, Sent, Summing
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from tests.methods.reference import setup_of
from tests.refusals import refused

SIZE = 1000


def messages(count: int, compressor: Compressor, silent: tuple[int, ...] = ()) -> list[FromClient | None]:
    """A message of a thousand entries a leaf, None for a leaf that has sent nothing."""
    here = setup_of("fedavg", {})
    draw = torch.Generator().manual_seed(0)
    sent: list[FromClient | None] = []
    for leaf in range(count):
        x = {"w": torch.randn(SIZE, generator=draw)}
        packet, _ = compressor.encode(x, {}, here.context(0, here.plan(0), leaf % 3, "test").generator)
        # Billed, and not added.
        message = {"delta": packet, "other": Dense().encode({"n": torch.ones(9)}, {}, None)[0]}  # type: ignore[arg-type]
        sent.append(None if leaf in silent else FromClient(10 + leaf, message, 1.0 + leaf))
    return sent


def summing(rule: Gather) -> Summing:
    here = setup_of("fedavg", {})
    here.method.gather = {"delta": rule}
    return Summing(here)


def sent_by(rule: Gather, given: list[FromClient | None], first: int = 0) -> Sent:
    left = iter(given)
    return summing(rule).sent((first, first + len(given)), lambda: next(left), 0, packets=True)


def by_bytes(found: Aggregate) -> object:
    trees = {"sum": found.sum, "weights": found.weights, **{str(key): item for key, item in found.items.items()}}
    assert all(isinstance(one, dict) for one in trees.values())
    tensors = {(where, name): tensor for where, one in trees.items() for name, tensor in one.items()}  # type: ignore[union-attr]
    return found.weight, found.count, {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}


def plainly(rule: Gather, given: list[FromClient | None]) -> Aggregate:
    def add(total: Aggregate, leaf: int) -> Aggregate:
        one = given[leaf]
        return total if one is None else rule.add(total, one.message["delta"], one.weight, one.client)

    return add_up((0, len(given)), rule.empty, add, rule.merge)


RULES = [WeightedMean(), Sum(), ElementwiseMean("sent"), ElementwiseMean("nonzero"), Collect()]


# A packet of 100 of 1,000 entries has about an eighth of the sum's bytes, and ElementwiseMean's sum is twice as large.
@pytest.mark.parametrize(
    ("rule", "count", "packets"),
    [
        (WeightedMean(), 4, True),
        (WeightedMean(), 12, False),
        (ElementwiseMean("nonzero"), 12, True),
        (ElementwiseMean("nonzero"), 24, False),
        (Collect(), 24, True),
    ],
)
def test_packets_travel_while_they_are_smaller_than_their_sum(rule: Gather, count: int, packets: bool):
    given = messages(count, TopK(keep_ratio=0.1))
    found = sent_by(rule, given)
    assert isinstance(found, Packets) is packets
    if isinstance(found, Packets):
        assert len(found.by_leaf) == count
        assert all(set(one.message) == {"delta"} for one in found.by_leaf.values())


def test_dense_packets_are_added_at_once():
    assert isinstance(sent_by(WeightedMean(), messages(1, Dense())), Added)
    # Half the size: one is smaller than the sum, two are not.
    assert isinstance(sent_by(WeightedMean(), messages(1, Dense(dtype="fp16"))), Packets)
    assert isinstance(sent_by(WeightedMean(), messages(2, Dense(dtype="fp16"))), Added)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("compressor", [Dense(), Dense(dtype="fp16"), TopK(keep_ratio=0.1)], ids=repr)
@pytest.mark.parametrize("silent", [(), (0, 5), tuple(range(9))])
def test_who_adds_changes_no_bit(rule: Gather, compressor: Compressor, silent: tuple[int, ...]):
    given = messages(9, compressor, silent)
    expected = by_bytes(plainly(rule, given))
    here = summing(rule)
    # The nodes below (0, 9), a cut through them, and single leaves.
    for nodes in (
        [(0, 9)],
        [(0, 5), (5, 9)],
        [(0, 3), (3, 5), (5, 7), (7, 9)],
        [(leaf, leaf + 1) for leaf in range(9)],
    ):
        parts = {node: sent_by(rule, given[slice(*node)], node[0]) for node in nodes}
        assert by_bytes(here.summed((0, 9), parts)["delta"]) == expected


def test_packets_are_added_at_once_where_they_may_not_stay():
    left = iter(messages(4, TopK(keep_ratio=0.1)))
    assert isinstance(summing(WeightedMean()).sent((0, 4), lambda: next(left), 0), Added)


def test_a_message_that_is_not_finite_names_its_client():
    (one,) = messages(1, Dense())
    assert one is not None
    x = gather.tree.Difference({"w": torch.full((SIZE,), math.nan)}, {"w": torch.zeros(SIZE)})
    packet, _ = Dense().encode_difference(x, {}, None)  # type: ignore[arg-type]
    with refused(names=["round 0", "client 10", "'w'", "NaN"], error=ClientError):
        sent_by(WeightedMean(), [one._replace(message={"delta": packet})])


@pytest.mark.parametrize("method", ["fedavg", "fedpse", "fedmgda"])
def test_a_run_with_packets_has_the_bits_of_one_with_sums(method: str, monkeypatch: pytest.MonkeyPatch):
    options = {} if method == "fedpse" else {"uplink": TopK(keep_ratio=0.1)}
    here: Setup = replace(setup_of(method, {"batch_size": 4}, sizes=(4,) * 9, rounds=2), **options)
    kinds: set[type] = set()
    sent = Summing.sent

    # Any: what `Summing.sent` takes.
    def noted(self: Summing, *given: Any) -> Sent:
        found = sent(self, *given)
        kinds.add(type(found))
        return found

    monkeypatch.setattr(Summing, "sent", noted)
    alone, shuffled = InlineExecutor(here), Shuffled(here)
    records, run_states = play(here, alone)
    assert kinds == {Added}
    others, other_states = play(here, shuffled)
    assert Packets in kinds
    assert rows(records) == rows(others)
    assert_same_bits(contents(alone, run_states[-1]), contents(shuffled, other_states[-1]))
