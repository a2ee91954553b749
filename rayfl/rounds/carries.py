"""Carries on their way between main memory and a device: of a stack, or of one client, as one buffer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rayfl.data.device import upload
from rayfl.methods.base import Carry

PAGE = 256
"""Bytes from one leaf's place in the buffer to the next are a multiple of this, as in CUDA's own allocations."""


def stacked(carries: Sequence[Carry], width: int, device: torch.device) -> Carry:
    """The carries as one, every leaf [width, ...] on the device; those that are missing are copies of the first."""
    flat = [tree_flatten(carry) for carry in carries]
    spec, missing = flat[0][1], width - len(carries)
    if device.type == "cpu":
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return tree_unflatten([torch.stack([*column, *[column[0]] * missing]) for column in columns], spec)
    return _travel([leaves for leaves, _ in flat], missing, spec, device)


def rows(carry: Carry, count: int) -> list[Carry]:
    """The first `count` clients' carries of a stack, in main memory of their own; it waits for the device once."""
    leaves, spec = tree_flatten(carry)
    here = landed(leaves) if leaves and leaves[0].device.type != "cpu" else leaves
    return [tree_unflatten([leaf[row].clone() for leaf in here], spec) for row in range(count)]


def to_device(carry: Carry, device: torch.device) -> Carry:
    """One client's carry on the device."""
    leaves, spec = tree_flatten(carry)
    if device.type == "cpu" or not leaves:
        return carry
    gone = _travel([leaves], 0, spec, device)
    return tree_unflatten([leaf[0] for leaf in tree_flatten(gone)[0]], spec)


def to_memory(carry: Carry) -> Carry:
    """One client's carry in main memory; it waits for the device once."""
    leaves, spec = tree_flatten(carry)
    if not leaves or leaves[0].device.type == "cpu":
        return carry
    return tree_unflatten([leaf.clone() for leaf in landed(leaves)], spec)


def laid(shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[list[int], int]:
    """Where each leaf begins in a buffer, in bytes, and the buffer's size."""
    starts, end = [], 0
    for shape, dtype in shapes:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // PAGE) * PAGE
    return starts, end


def packed(columns: Sequence[Sequence[Tensor]]) -> Tensor:
    """One buffer of bytes of all leaves; `columns`: of each leaf, the tensors that are stacked."""
    shapes = [(torch.Size([len(column), *column[0].shape]), column[0].dtype) for column in columns]
    _, size = laid(shapes)
    buffer = torch.empty(size, dtype=torch.uint8, device=columns[0][0].device)
    for column, leaf in zip(columns, unpacked(buffer, shapes), strict=True):
        torch.stack(list(column), out=leaf)
    return buffer


def unpacked(buffer: Tensor, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """The leaves in a buffer: views, each at the start of a page."""
    starts, _ = laid(shapes)
    leaves = []
    for start, (shape, dtype) in zip(starts, shapes, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        leaves.append(buffer[start:end].view(dtype).view(shape))
    return leaves


def landed(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves in main memory, by one copy of one buffer."""
    buffer = packed([[leaf] for leaf in leaves]).cpu()
    shapes = [(torch.Size([1, *leaf.shape]), leaf.dtype) for leaf in leaves]
    return [leaf[0] for leaf in unpacked(buffer, shapes)]


# Any: leaves of carries, which are tensors.
def _travel(carries: Sequence[Sequence[Any]], missing: int, spec: TreeSpec, device: torch.device) -> Carry:
    columns = [[*column, *[column[0]] * missing] for column in zip(*carries, strict=True)]
    if not columns:
        return tree_unflatten([], spec)
    shapes = [(torch.Size([len(column), *column[0].shape]), column[0].dtype) for column in columns]
    return tree_unflatten(unpacked(upload(packed(columns), device), shapes), spec)
