"""Sums and means of messages, with numbers by hand."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.compress.base import BLOCK, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.scalar import count_packet
from rayfl.compress.sparse import sparse_packet
from rayfl.gather import (
    Aggregate,
    Collect,
    ElementwiseMean,
    Gather,
    Relay,
    Sum,
    WeightedMean,
    alone,
    from_wire,
    to_wire,
)
from rayfl.rounds.executor import InlinePacket
from rayfl.tree import Tree
from tests.pretended_gpu import PretendedGpu, on_gpu
from tests.refusals import refused

RULES = [WeightedMean(), Sum(), ElementwiseMean("sent"), ElementwiseMean("nonzero"), Collect()]


def dense(*values: float) -> Packet:
    return Dense().encode({"w": torch.tensor(values, dtype=torch.float32)}, {}, np.random.default_rng(0))[0]


def sparse(values: list[float], sent: list[bool]) -> Packet:
    return sparse_packet({"w": torch.tensor(values, dtype=torch.float32)}, {"w": torch.tensor(sent)})


def gathered(rule: Gather, *messages: tuple[Packet, float]) -> Aggregate:
    total = rule.empty()
    for sender, (packet, weight) in enumerate(messages):
        total = rule.add(total, packet, weight, sender)
    return total


def values(x: Tree) -> list[float]:
    return x["w"].tolist()


def test_weighted_mean():
    # (1 * [2, 4] + 3 * [6, 0]) / 4 = [5, 1].
    total = gathered(WeightedMean(), (dense(2, 4), 1.0), (dense(6, 0), 3.0))
    assert values(total.result) == [5.0, 1.0]
    assert (values(total.sum), total.weight, total.count) == ([20.0, 4.0], 4.0, 2)


def test_sum_leaves_weights_aside():
    total = gathered(Sum(), (dense(2, 4), 1.0), (dense(6, 0), 3.0))
    assert values(total.result) == values(total.sum) == [8.0, 4.0]
    assert (total.weight, total.count) == (4.0, 2)


def test_elementwise_mean_over_those_who_sent():
    # Entry 0: (1 * 2 + 3 * 6) / 4; entry 1: the second sent a zero, (1 * 4 + 3 * 0) / 4; entry 2: 3 * 8 / 3; 3: nobody.
    first = sparse([2, 4, 0, 0], [True, True, False, False])
    second = sparse([6, 0, 8, 0], [True, True, True, False])
    total = gathered(ElementwiseMean("sent"), (first, 1.0), (second, 3.0))
    assert values(total.result) == [5.0, 1.0, 8.0, 0.0]
    assert total.weights["w"].tolist() == [4.0, 4.0, 3.0, 0.0]


def test_elementwise_mean_over_nonzero_entries():
    # Entry 1: the zero of the second does not count.
    first = sparse([2, 4, 0, 0], [True, True, False, False])
    second = sparse([6, 0, 8, 0], [True, True, True, False])
    total = gathered(ElementwiseMean("nonzero"), (first, 1.0), (second, 3.0))
    assert values(total.result) == [5.0, 4.0, 8.0, 0.0]


def test_elementwise_mean_keeps_cancelling_entries_apart_from_missing_ones():
    total = gathered(ElementwiseMean("nonzero"), (dense(3.0), 1.0), (dense(-3.0), 1.0))
    assert values(total.result) == [0.0]
    assert total.weights["w"].tolist() == [2.0]


def test_collect_keeps_every_message_by_sender():
    rule = Collect()
    total = rule.merge(rule.add(rule.empty(), dense(1.0), 2.0, 3), rule.add(rule.empty(), dense(2.0), 1.0, 7))
    assert {sender: values(item) for sender, item in total.items.items() if isinstance(item, dict)} == {
        3: [1.0],
        7: [2.0],
    }
    assert list(total.items) == [3, 7]
    assert (total.weight, total.count, total.result) == (3.0, 2, {})


def test_counts_are_summed_exactly():
    # 2^53 - 1 and 1: float32 would lose the 1, float64 does not.
    total = gathered(Sum(), (count_packet("n", 2**53 - 1), 1.0), (count_packet("n", 1), 1.0))
    assert int(total.sum["n"]) == 2**53


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_arrived(rule: Gather):
    assert (rule.empty().result, rule.empty().count, rule.empty().weight) == ({}, 0, 0.0)
    full = rule.add(rule.empty(), dense(1, 2), 1.0, 0)
    for merged in (rule.merge(full.copied(), rule.empty()), rule.merge(rule.empty(), full)):
        assert str(merged) == str(full)
    assert rule.merge(rule.empty(), rule.empty()).result == {}


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_merging_is_adding_in_order(rule: Gather):
    # Small whole numbers: exact in any order.
    messages = [(dense(1, 0, 3), 1.0), (dense(0, 5, 2), 2.0), (dense(4, 0, 0), 4.0)]
    whole = gathered(rule, *messages)
    right = rule.add(rule.add(rule.empty(), *messages[1], 1), *messages[2], 2)
    merged = rule.merge(rule.add(rule.empty(), *messages[0], 0), right)
    assert str(merged) == str(whole)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_merging_uses_up_the_first_and_leaves_the_second(rule: Gather):
    a, b = gathered(rule, (dense(1, 2), 1.0)), gathered(rule, (dense(3, 4), 2.0))
    before = str(b)
    rule.merge(rule.merge(rule.empty(), b), b)
    assert str(b) == before
    memory = {name: tensor.data_ptr() for name, tensor in a.sum.items()}
    assert {name: tensor.data_ptr() for name, tensor in rule.merge(a, b).sum.items()} == memory


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_joining_is_merging_in_new_memory(rule: Gather):
    a, b = gathered(rule, (dense(1, 2), 1.0)), gathered(rule, (dense(3, 4), 2.0))
    for left, right in ((a, b), (a, rule.empty()), (rule.empty(), b), (rule.empty(), rule.empty())):
        before = str((left, right))
        joined = rule.joined(left, right)
        merged = rule.merge(left.copied(), right)
        assert str(replace(joined, sums=alone(joined.sum))) == str(merged)
        for tensor in joined.sum.values():
            tensor.add_(1.0)
        assert str((left, right)) == before


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_adding_does_not_write_into_packets(rule: Gather):
    first, second = dense(1, 2), dense(3, 4)
    gathered(rule, (first, 1.0), (second, 1.0), (first, 1.0))
    assert (first.parts["w"].tolist(), second.parts["w"].tolist()) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_aggregate_survives_the_wire(rule: Gather):
    total = gathered(rule, (dense(1, 0), 1.0), (dense(0, 5), 2.0))
    copy = from_wire(pickle.loads(pickle.dumps(to_wire(total))))  # noqa: S301 - our own bytes
    assert str(copy) == str(total)


def test_scaled_multiplies_every_message():
    factors = {"w": torch.tensor([2.0, -1.0])}
    # Twice (1 * 2 + 3 * 6) / 4, minus (1 * 4 + 3 * 0) / 4.
    total = gathered(WeightedMean(), (dense(2, 4), 1.0), (dense(6, 0), 3.0))
    assert values(total.scaled(factors).result) == [10.0, -1.0]
    assert values(total.result) == [5.0, 1.0]
    collected = gathered(Collect(), (dense(2, 4), 1.0)).scaled(factors)
    assert [values(item) for item in collected.items.values() if isinstance(item, dict)] == [[4.0, -4.0]]


def test_scaled_takes_the_support_of_an_elementwise_mean_as_it_is():
    total = gathered(ElementwiseMean("sent"), (sparse([2, 0], [True, False]), 1.0), (dense(4, 6), 1.0))
    # (2 + 4) / 2 * 10, and 6 / 1 * 100.
    assert values(total.scaled({"w": torch.tensor([10.0, 100.0])}).result) == [30.0, 600.0]


@pytest.mark.parametrize("rule", [WeightedMean(), Sum(), ElementwiseMean("sent")])
def test_what_is_taken_from_a_model_is_the_result(rule: Gather):
    # Three tensors: of several blocks, of one, and of one number.
    shapes, draw = {"large": (3, BLOCK // 2 + 1), "small": (5,), "number": ()}, torch.Generator().manual_seed(0)

    def drawn() -> Tree:
        return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}

    def sent() -> Packet:
        return Dense().encode(drawn(), {}, np.random.default_rng(0))[0]

    model, a, b = drawn(), gathered(rule, (sent(), 3.0), (sent(), 0.7)), gathered(rule, (sent(), 5.0))
    before = [tree.vector(one.sum) for one in (a, b)]
    both = rule.joined(a, b)
    for total in (a, both, replace(both, known=model)):
        expected = tree.sub(model, total.result)
        assert torch.equal(tree.vector(total.taken_from(model)), tree.vector(expected))
    # The sums are added when their sum is read, and not changed.
    assert torch.equal(tree.vector(both.sum), before[0] + before[1])
    assert all(torch.equal(tree.vector(one.sum), then) for one, then in zip((a, b), before, strict=True))
    late = rule.joined(a, b)
    assert torch.equal(tree.vector(late.taken_from(model)), tree.vector(both.taken_from(model)))
    assert "sum" not in vars(late) or type(rule) is not WeightedMean


def test_relayed_packets_cannot_be_scaled():
    total = Aggregate(Relay(), count=1, items={0: InlinePacket(dense(1.0))})
    with refused(names=["rescaled", "Collect"]):
        total.scaled({"w": torch.ones(1)})
    assert Relay().empty().scaled({}).items == {}


@pytest.mark.parametrize("first_there", [True, False])
def test_a_sum_on_a_gpu_and_one_in_main_memory_are_merged_where_the_first_lies(first_there: bool):
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([10.0, 20.0])}
    with PretendedGpu():
        left = {name: on_gpu(tensor) for name, tensor in a.items()} if first_there else a
        right = b if first_there else {name: on_gpu(tensor) for name, tensor in b.items()}
        rule = Sum()
        merged = rule.merge(Aggregate(rule, (left,), count=1), Aggregate(rule, (right,), count=1)).sum["w"]
        assert merged.device == left["w"].device and merged.cpu().tolist() == [11.0, 22.0]
