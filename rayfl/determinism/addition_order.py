"""The order of additions: a binary tree whose leaves are the sorted participants; their number alone decides it.

A node's sum is the sum of its left half plus the sum of its right half. A call gets consecutive participants (a span)
and returns the sums of the largest nodes inside the span; if the span is a node, one sum. The caller adds these sums
along the rest of the tree. So neither the number of workers, nor the calls, nor the order of answers can change a bit.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

SumNode = tuple[int, int]
"""The first leaf, and the leaf after the last one."""

T = TypeVar("T")


def runs(items: Sequence[int], num_spans: int) -> list[tuple[int, ...]]:
    """Cut the items in order into at most `num_spans` spans, whose lengths differ by at most one."""
    num_spans = min(num_spans, len(items))
    bounds = [len(items) * index // num_spans for index in range(num_spans + 1)] if num_spans else [0]
    return [tuple(items[first:last]) for first, last in itertools.pairwise(bounds)]


def halves(node: SumNode) -> tuple[SumNode, SumNode]:
    """The two children of a node with at least two leaves; the first is the larger one."""
    first, last = node
    middle = (first + last + 1) // 2
    return (first, middle), (middle, last)


def cut(num_leaves: int, num_calls: int, stack_width: int = 1, at_most: bool = False) -> list[SumNode]:
    """The span of each call, in order: at least `num_calls` calls, if there are that many leaves.

    Every span is a node of the tree, and none is longer than an even share. `at_most`: at most `num_calls` calls, none
    longer than an even share: nodes if at most `num_calls` are enough, otherwise even spans. Stacks of several clients
    are not cut: if `stack_width` is above 1, there are at most `num_calls` spans of whole stacks, which need not be
    nodes.
    """
    nodes: list[SumNode] = [(0, num_leaves)] if num_leaves else []
    while nodes and stack_width == 1:
        widest = max(last - first for first, last in nodes)
        if widest == 1 or ((at_most or len(nodes) >= num_calls) and widest <= -(-num_leaves // num_calls)):
            break
        nodes = [
            node
            for parts in [halves(node) if node[1] - node[0] == widest else (node,) for node in nodes]
            for node in parts
        ]
    if stack_width > 1 or (at_most and len(nodes) > num_calls):
        return [
            (span[0], min(span[-1] + stack_width, num_leaves))
            for span in runs(range(0, num_leaves, stack_width), num_calls)
        ]
    return nodes


def nodes_within(span: SumNode, root: SumNode) -> list[SumNode]:
    """The largest nodes below `root` that lie inside a span of its leaves, in order."""
    if span[0] <= root[0] and root[1] <= span[1]:
        return [root]
    if root[1] <= span[0] or span[1] <= root[0]:
        return []
    return [node for half in halves(root) for node in nodes_within(span, half)]


def add_up(node: SumNode, empty: Callable[[], T], add: Callable[[T, int], T], merge: Callable[[T, T], T]) -> T:
    """The sum of `node`. Adds its leaves in order, with at most ceil(log2(leaves)) + 1 sums in memory.

    `add` adds a leaf to a sum, `merge` the second sum to the first; both may change the first. A right half of one leaf
    is added directly to the left half's sum.
    """
    if node[1] - node[0] == 1:
        return add(empty(), node[0])
    left, right = halves(node)
    total = add_up(left, empty, add, merge)
    is_leaf = right[1] - right[0] == 1
    return add(total, right[0]) if is_leaf else merge(total, add_up(right, empty, add, merge))


def pairs(nodes: Sequence[SumNode], leaves: Sequence[int]) -> tuple[list[list[tuple[int, int]]], dict[SumNode, int]]:
    """The additions that make the sums of `nodes` as `add_up` does, of the leaves that have something to add.

    Returns levels of pairs of positions in `leaves`: the second is added to the first, and no position is in two pairs
    of a level. And by node, the position at which its sum then is; nodes without such leaves are left out.
    """
    position = {leaf: index for index, leaf in enumerate(leaves)}
    levels: list[list[tuple[int, int]]] = []

    def visit(node: SumNode) -> tuple[int | None, int]:
        """The position of a node's sum, and the number of levels after which it is there."""
        if node[1] - node[0] == 1:
            return position.get(node[0]), 0
        (left, depth), (right, other) = map(visit, halves(node))
        if left is None or right is None:
            return (right, other) if left is None else (left, depth)
        level = max(depth, other)
        levels.extend([] for _ in range(level + 1 - len(levels)))
        levels[level].append((left, right))
        return left, level + 1

    sums = {node: visit(node)[0] for node in nodes}
    return levels, {node: index for node, index in sums.items() if index is not None}


def total(root: SumNode, sums: Mapping[SumNode, T], join: Callable[[T, T], T], merge: Callable[[T, T], T]) -> T:
    """The sum of `root` from the sums of nodes that cover it, which are not changed.

    `merge` adds the second sum to the first, which it changes; `join` makes a new sum of both.
    """
    if root in sums:
        return sums[root]
    left, right = halves(root)
    below = total(right, sums, join, merge)
    return join(sums[left], below) if left in sums else merge(total(left, sums, join, merge), below)


def ready_nodes(root: SumNode, known: Collection[SumNode], most: int = 2) -> dict[SumNode, tuple[SumNode, ...]]:
    """The largest nodes at and below `root`, in order, that two to `most` nodes of `known` cover, each with these."""
    ready: dict[SumNode, tuple[SumNode, ...]] = {}

    def cover(node: SumNode) -> tuple[SumNode, ...]:
        """The known nodes that cover a node, in order; () if they do not, or are more than `most`."""
        if node in known or node[1] - node[0] == 1:
            return (node,) if node in known else ()
        left, right = map(cover, halves(node))
        if not left or not right or len(left) + len(right) > most:
            return ()
        for half in halves(node):
            ready.pop(half, None)
        ready[node] = left + right
        return ready[node]

    cover(root)
    return ready
