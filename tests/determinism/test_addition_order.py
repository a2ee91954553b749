"""The order of additions depends on the number of participants and on nothing else."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.sign import OneBit, ScaledSign
from rayfl.compress.sparse import TopK, sparse_packet
from rayfl.compress.ternary import Ternary
from rayfl.determinism.addition_order import SumNode, add_up, cut, halves, nodes_within, pairs, ready_nodes, runs, total
from rayfl.gather import Aggregate, Collect, ElementwiseMean, Gather, Sum, WeightedMean, from_wire, to_wire


def test_runs_are_in_order_and_as_even_as_can_be():
    assert runs([3, 5, 7, 8, 9], 3) == [(3,), (5, 7), (8, 9)]
    assert runs([], 0) == runs([], 4) == []
    assert runs([1, 2], 5) == [(1,), (2,)]


def test_the_larger_half_comes_first():
    assert halves((0, 5)) == ((0, 3), (3, 5))
    assert halves((3, 5)) == ((3, 4), (4, 5))


def tree_sum(numbers: np.ndarray, node: SumNode) -> float:
    return add_up(node, lambda: 0.0, lambda total, leaf: total + numbers[leaf], lambda a, b: a + b)


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("width", [1000, 64, 7])
def test_levels_of_pairs_make_the_sums_of_the_tree(share: float, width: int):
    """For every number of participants, of whom some may send nothing, in one stack or several."""
    draws = np.random.default_rng(5)
    for count in range(1, 131):
        sends = draws.random(count) < share
        numbers = draws.standard_normal(count) * sends
        for first in range(0, count, width):
            nodes = nodes_within((first, min(first + width, count)), (0, count))
            leaves = [leaf for first, last in nodes for leaf in range(first, last) if sends[leaf]]
            levels, places = pairs(nodes, leaves)
            sums = numbers[leaves]
            for level in levels:
                into, others = map(list, zip(*level, strict=True))
                assert len({*into, *others}) == 2 * len(level)
                sums[into] += sums[others]
            assert all(len(level) for level in levels)
            for node in nodes:
                assert (sums[places[node]] if node in places else 0.0) == tree_sum(numbers, node)


def test_calls_are_nodes_no_wider_than_an_even_share():
    # (0, 5) -> (0, 3) (3, 5) -> (0, 2) (2, 3) (3, 5), which are three.
    assert cut(5, 1) == [(0, 5)]
    assert cut(5, 2) == [(0, 3), (3, 5)]
    assert cut(5, 3) == [(0, 2), (2, 3), (3, 5)]
    assert cut(5, 4) == cut(5, 9) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert cut(0, 4) == []
    # An even share of 50 in six calls is 9; the four nodes of 12 and 13 are halved once more.
    assert [last - first for first, last in cut(50, 6)] == [7, 6, 6, 6, 7, 6, 6, 6]


@given(num_leaves=st.integers(1, 300), wanted=st.integers(1, 80))
def test_calls_cover_all_leaves_and_are_enough(num_leaves: int, wanted: int):
    nodes = cut(num_leaves, wanted)
    assert [0, *(last for _, last in nodes)] == [*(first for first, _ in nodes), num_leaves]
    assert min(wanted, num_leaves) <= len(nodes) < 2 * wanted + 1
    assert max(last - first for first, last in nodes) <= math.ceil(num_leaves / wanted)
    assert all(nodes_within(node, (0, num_leaves)) == [node] for node in nodes)


@given(num_leaves=st.integers(1, 300), wanted=st.integers(1, 80))
def test_at_most_as_many_calls_as_wanted(num_leaves: int, wanted: int):
    found = cut(num_leaves, wanted, at_most=True)
    assert [0, *(last for _, last in found)] == [*(first for first, _ in found), num_leaves]
    assert len(found) <= wanted
    assert max(last - first for first, last in found) <= math.ceil(num_leaves / wanted)


def test_stacks_stay_whole():
    # Stacks of 4: (0, 4) (4, 8) (8, 10).
    assert cut(10, 2, stack_width=4) == [(0, 4), (4, 10)]
    assert cut(10, 9, stack_width=4) == [(0, 4), (4, 8), (8, 10)]
    assert nodes_within((4, 10), (0, 10)) == [(4, 5), (5, 10)]


def bracketed(node: SumNode) -> str:
    def add(total: str, leaf: int) -> str:
        return f"({total}+{leaf})" if total else str(leaf)

    return add_up(node, str, add, lambda a, b: f"({a}+{b})")


def test_the_tree_of_five_leaves():
    assert bracketed((0, 5)) == "(((0+1)+2)+(3+4))"


# Any cutting of n leaves into runs.
CUTS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n)).map(lambda inner: sorted({0, n, *inner})))
)


@given(CUTS, st.integers(2, 9))
def test_whoever_adds_what_the_brackets_are_the_same(where: tuple[int, list[int]], most: int):
    num_leaves, bounds = where
    root = (0, num_leaves)
    nodes = [node for run in itertools.pairwise(bounds) for node in nodes_within(run, root)]
    sums = {node: bracketed(node) for node in nodes}
    plus = lambda a, b: f"({a}+{b})"  # noqa: E731
    assert total(root, sums, plus, plus) == bracketed(root)
    # Node by node, as calls do it.
    while root not in sums:
        ready = ready_nodes(root, sums, most)
        assert ready
        for node, parts in ready.items():
            assert 2 <= len(parts) <= most
            sums[node] = total(node, {part: sums.pop(part) for part in parts}, plus, plus)
    assert sums == {root: bracketed(root)}


RULES = (WeightedMean(), Sum(), ElementwiseMean("sent"), ElementwiseMean("nonzero"), Collect())
WEIGHTS = (0.1, 3.0, 1.0, 1 / 3, 0.7)


def packets(seed: int) -> list[Packet]:
    """A packet of every kind, with zeros of both signs among the values."""
    draw = np.random.default_rng(seed)
    values = np.asarray(draw.standard_normal(70_000) * 10.0 ** draw.integers(-3, 4, 70_000), np.float32)
    values[draw.integers(0, values.size, 9000)] = 0.0
    values[draw.integers(0, values.size, 9000)] = -0.0
    x = {"w": torch.from_numpy(values), "b": torch.tensor([-0.0, 1.1, -0.3])}
    kinds: list[Compressor] = [Dense(), Dense(dtype="fp16"), TopK(keep_ratio=0.05), ScaledSign(), OneBit(), Ternary()]
    some = {name: tensor > 0.2 for name, tensor in x.items()}
    every = {name: torch.ones_like(mask) for name, mask in some.items()}
    return [
        *(kind.encode(x, kind.init(x), draw)[0] for kind in kinds),
        TopK(keep_ratio=0.9, values="fp16").encode(x, {}, draw)[0],
        sparse_packet(x, some),
        sparse_packet(x, every),
    ]


PACKETS = [packet for seed in range(3) for packet in packets(seed)]


def leaf_adder(rule: Gather, gone: set[int]):
    def add(sums: Aggregate, leaf: int) -> Aggregate:
        if leaf in gone:
            return sums
        return rule.add(sums, PACKETS[leaf % len(PACKETS)], WEIGHTS[leaf % len(WEIGHTS)], leaf)

    return add


def by_bytes(found: Aggregate) -> object:
    tensors = {**found.sum, **{f"weight of {name}": tensor for name, tensor in found.weights.items()}}
    for sender, item in found.items.items():
        assert isinstance(item, dict)
        tensors |= {f"{sender}/{name}": tensor for name, tensor in item.items()}
    return found.weight, found.count, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@settings(deadline=None, max_examples=25)
@given(CUTS, st.sets(st.integers(0, 39)), st.sampled_from(RULES))
def test_no_cut_changes_a_bit(where: tuple[int, list[int]], gone: set[int], rule: Gather):
    num_leaves, bounds = where
    root, add = (0, num_leaves), leaf_adder(rule, gone)
    nodes = [node for run in itertools.pairwise(bounds) for node in nodes_within(run, root)]
    sums = {node: from_wire(to_wire(add_up(node, rule.empty, add, rule.merge))) for node in nodes}
    before = {node: by_bytes(one) for node, one in sums.items()}
    cut_up = total(root, sums, rule.joined, rule.merge)
    assert by_bytes(cut_up) == by_bytes(add_up(root, rule.empty, add, rule.merge))
    assert {node: by_bytes(one) for node, one in sums.items()} == before


def test_a_right_leaf_adds_what_its_own_sum_would():
    for rule in RULES:
        for leaf, packet in enumerate(PACKETS):
            begun = lambda: rule.add(rule.empty(), PACKETS[0], 0.1, -1)  # noqa: B023, E731 - called at once
            alone = rule.add(rule.empty(), packet, 0.7, leaf)
            assert by_bytes(rule.add(begun(), packet, 0.7, leaf)) == by_bytes(rule.merge(begun(), alone))
            for tensor in alone.sum.values():
                assert not bool((torch.signbit(tensor) & (tensor == 0)).any())


@dataclass
class Counted:
    """Sums that count how many of them are alive."""

    alive: int = 0
    most: int = 0

    def empty(self) -> int:
        self.alive += 1
        self.most = max(self.most, self.alive)
        return 0

    def merge(self, a: int, b: int) -> int:
        self.alive -= 1
        return a + b


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 50, 63, 64, 65, 100, 1000])
def test_few_sums_live_at_once(num_leaves: int):
    counted = Counted()
    assert add_up((0, num_leaves), counted.empty, lambda sums, leaf: sums + 1, counted.merge) == num_leaves
    assert counted.alive == 1
    assert counted.most <= math.ceil(math.log2(num_leaves)) + 1


def test_float_sums_show_the_order():
    # In float32, (1e8 + 1) + -1e8 is 0 and 1e8 + (1 + -1e8) is 0, but (1e8 + -1e8) + 1 is 1.
    values = [np.float32(value) for value in (1e8, -1e8, 1.0)]
    assert add_up((0, 3), lambda: np.float32(0), lambda sums, leaf: sums + values[leaf], lambda a, b: a + b) == 1.0


def test_collecting_many_messages_takes_time_in_proportion():
    rule, packet = Collect(), Dense().encode({"w": torch.zeros(1)}, {}, np.random.default_rng(0))[0]
    found = add_up((0, 5000), rule.empty, lambda sums, leaf: rule.add(sums, packet, 1.0, leaf), rule.merge)
    # The same mapping all along: nothing was copied from message to message.
    assert list(found.items) == list(range(5000))
    begun = rule.add(rule.empty(), packet, 1.0, 0)
    assert rule.add(begun, packet, 1.0, 1).items is begun.items
