"""The order of additions depends on the number of chunks and on nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.determinism.addition_order import Node, chunks, cut, halves, total


def test_chunks_are_runs_in_order_and_as_even_as_can_be():
    assert chunks([3, 5, 7, 8, 9], 3) == [(3,), (5, 7), (8, 9)]
    assert chunks([], 0) == []
    assert [len(chunk) for chunk in chunks(range(50), 16)] == [3, 3, 3, 3, 3, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 4]


def test_the_larger_half_comes_first():
    assert halves((0, 5)) == ((0, 3), (3, 5))
    assert halves((3, 5)) == ((3, 4), (4, 5))


def test_cut_halves_the_widest_nodes():
    # (0, 5) -> (0, 3) (3, 5) -> (0, 2) (2, 3) (3, 5), which are three.
    assert cut(5, 1) == [(0, 5)]
    assert cut(5, 2) == [(0, 3), (3, 5)]
    assert cut(5, 3) == [(0, 2), (2, 3), (3, 5)]
    assert cut(5, 9) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert cut(0, 4) == []


def bracketed(node: Node, known: dict[Node, str]) -> str:
    def leaf(node: Node) -> str | None:
        return known.get(node, str(node[0]) if node[1] - node[0] == 1 else None)

    return total(node, leaf, lambda a, b: f"({a}+{b})")


def test_the_tree_of_five_chunks():
    assert bracketed((0, 5), {}) == "(((0+1)+2)+(3+4))"


@given(num_chunks=st.integers(1, 40), wanted=st.integers(1, 50))
def test_whoever_adds_what_the_brackets_are_the_same(num_chunks: int, wanted: int):
    nodes = cut(num_chunks, wanted)
    assert [first for first, _ in nodes] + [num_chunks] == [0] + [last for _, last in nodes]
    assert len(nodes) >= min(wanted, num_chunks)
    parts = {node: bracketed(node, {}) for node in nodes}
    assert bracketed((0, num_chunks), parts) == bracketed((0, num_chunks), {})


def test_float_sums_show_the_order():
    # In float32, (1e8 + 1) + -1e8 is 0 and 1e8 + (1 + -1e8) is 0, but (1e8 + -1e8) + 1 is 1.
    values = [np.float32(value) for value in (1e8, -1e8, 1.0)]
    assert total((0, 3), lambda n: values[n[0]] if n[1] - n[0] == 1 else None, lambda a, b: a + b) == 1.0


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 16, 17])
def test_every_chunk_is_added_once(num_chunks: int):
    assert total((0, num_chunks), lambda n: 1 if n[1] - n[0] == 1 else None, lambda a, b: a + b) == num_chunks
