"""The order of additions: a binary tree over chunks that depends on the number of participants and nothing else.

A chunk is a run of the sorted participants, added up one after another. Chunks are merged along a tree that halves its
range again and again. A worker is given all chunks below one node and returns that node's sum; the caller merges the
rest of the way up. So neither the number of workers nor the order in which they answer can change a bit.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Node = tuple[int, int]
"""Chunks first to last, the last not included."""

T = TypeVar("T")


def chunks(participants: Sequence[int], number: int) -> list[tuple[int, ...]]:
    """The participants in order, cut into at most `number` runs whose lengths differ by one at most."""
    number = min(number, len(participants))
    bounds = [len(participants) * index // number for index in range(number + 1)] if number else [0]
    return [tuple(participants[first:last]) for first, last in itertools.pairwise(bounds)]


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node with at least two chunks; the first is the larger one."""
    first, last = node
    middle = (first + last + 1) // 2
    return (first, middle), (middle, last)


def cut(num_chunks: int, wanted: int) -> list[Node]:
    """At least `wanted` nodes that cover all chunks (fewer if there are fewer chunks), in order."""
    nodes: list[Node] = [(0, num_chunks)] if num_chunks else []
    while len(nodes) < wanted and any(last - first > 1 for first, last in nodes):
        widest = max(last - first for first, last in nodes)
        split = [halves(node) if node[1] - node[0] == widest else (node,) for node in nodes]
        nodes = [node for parts in split for node in parts]
    return nodes


def total(node: Node, leaf: Callable[[Node], T | None], merge: Callable[[T, T], T]) -> T:
    """The sum below `node`. `leaf` gives the sum of a node that is already known, or None to descend."""
    known = leaf(node)
    if known is not None:
        return known
    left, right = halves(node)
    return merge(total(left, leaf, merge), total(right, leaf, merge))
