"""Carries, states and sums on their way between main memory and a device, as one buffer."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rayfl.data.travel import landed, stacked_there, there
from rayfl.methods.base import Carry

Nested = TypeVar("Nested")
"""Tensors in dictionaries and lists."""


def stacked(carries: Sequence[Carry], width: int, device: torch.device) -> Carry:
    """The carries as one, every leaf [width, ...] on the device; those that are missing are copies of the first."""
    flat = [tree_flatten(carry) for carry in carries]
    spec, missing = flat[0][1], width - len(carries)
    columns = [[*column, *[column[0]] * missing] for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    if device.type == "cpu":
        return tree_unflatten([torch.stack(column) for column in columns], spec)
    return tree_unflatten(stacked_there(columns, device), spec)


def rows(carry: Carry, count: int) -> list[Carry]:
    """The first `count` clients' carries of a stack, where it lies, each in memory of its own."""
    leaves, spec = tree_flatten(carry)
    return [tree_unflatten([leaf[row].clone() for leaf in leaves], spec) for row in range(count)]


def rows_in_memory(carry: Carry, count: int) -> list[Carry]:
    """`rows` in main memory; it waits for the device once."""
    leaves, spec = tree_flatten(carry)
    return rows(tree_unflatten(landed(leaves), spec), count)


def to_device(nested: Nested, device: torch.device) -> Nested:
    """The same on the device. What lies in main memory travels as one buffer."""
    if device.type == "cpu":
        return nested
    leaves, spec = tree_flatten(nested)
    return tree_unflatten(there(leaves, device), spec)


def to_memory(nested: Nested, device: torch.device) -> Nested:
    """The same in main memory, from the device that local work runs on; it waits for the device once."""
    if device.type == "cpu":
        return nested
    leaves, spec = tree_flatten(nested)
    return tree_unflatten(landed(leaves), spec)
