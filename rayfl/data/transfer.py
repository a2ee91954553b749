"""Moves nested tensors (trees, states, carries) between main memory and a device.

All tensors that have to move are copied together, as one buffer.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rayfl.data.device import download, upload
from rayfl.tree import private

# Any: tensors in dictionaries and lists.
TensorsT = TypeVar("TensorsT", bound=Any)

PAGE = 256
"""Each tensor begins in the buffer at a multiple of this number of bytes, as in CUDA's own allocations."""


def to_device(nested: TensorsT, device: torch.device) -> TensorsT:
    """The same on the device. Tensors in main memory are copied as one buffer; the others stay as they are."""
    if device.type == "cpu":
        return nested
    leaves, spec = tree_flatten(nested)
    moving = [leaf.device.type != device.type for leaf in leaves]
    copies = iter(_copied([[leaf] for leaf, moves in zip(leaves, moving, strict=True) if moves], device))
    return tree_unflatten(
        [next(copies)[0] if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)], spec
    )


def to_memory(nested: TensorsT, device: torch.device) -> TensorsT:
    """The same in main memory, from the device that local work runs on; waits for the device once."""
    if device.type == "cpu":
        return nested
    leaves, spec = tree_flatten(nested)
    moving = [leaf for leaf in leaves if leaf.device.type != "cpu"]
    if not moving:
        return nested
    shapes = [(torch.Size([1, *leaf.shape]), leaf.dtype) for leaf in moving]
    copies = iter(unpack(download([pack([[leaf] for leaf in moving])])[0], shapes))
    return tree_unflatten([next(copies)[0] if leaf.device.type != "cpu" else leaf for leaf in leaves], spec)


def stack(nested: Sequence[TensorsT], width: int, device: torch.device) -> TensorsT:
    """Stack `nested` on the device: every leaf becomes [width, ...]. Missing rows are copies of the first one."""
    spec = tree_flatten(nested[0])[1]
    columns = [[*column, *[column[0]] * (width - len(nested))] for column in zip(*map(_leaves, nested), strict=True)]
    if device.type == "cpu":
        return tree_unflatten([torch.stack(column) for column in columns], spec)
    moving = [all(tensor.device.type == "cpu" for tensor in column) for column in columns]
    copies = iter(_copied([column for column, moves in zip(columns, moving, strict=True) if moves], device))
    staying = [
        [upload(tensor, device) for tensor in column]
        for column, moves in zip(columns, moving, strict=True)
        if not moves
    ]
    stacked = iter(unpack(pack(staying), _stacked_shapes(staying)) if staying else ())
    return tree_unflatten([next(copies if moves else stacked) for moves in moving], spec)


def repeated(x: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """A stack [width, ...] of the same tensors, on their device."""
    shapes = [(torch.Size([width, *tensor.shape]), tensor.dtype) for tensor in x.values()]
    device = next((tensor.device for tensor in x.values()), None)
    copies = unpack(torch.empty(offsets(shapes)[1], dtype=torch.uint8, device=device), shapes)
    private._foreach_copy_(copies, [tensor.expand(copy.shape) for tensor, copy in zip(x.values(), copies, strict=True)])
    return dict(zip(x, copies, strict=True))


def unstack(stacked: TensorsT, count: int) -> list[TensorsT]:
    """The first `count` rows of a stack, on its device. In main memory each row owns its memory.

    On a GPU all rows are views of one copy of the stack, in which each tensor is aligned as in CUDA's own allocations:
    a row then costs no operation.
    """
    leaves = _leaves(stacked)
    if not leaves or leaves[0].device.type != "cuda":
        columns = [[row.clone() for row in leaf[:count].unbind()] for leaf in leaves]
        return [_filled(stacked, iter(row)) for row in zip(*columns, strict=True)] or [stacked] * count
    starts, size = offsets([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
    buffer = torch.empty((len(leaves[0]), size), dtype=torch.uint8, device=leaves[0].device)
    copies = [
        buffer[:, start : start + leaf.nbytes // len(leaf)].view(leaf.dtype).view(leaf.shape)
        for leaf, start in zip(leaves, starts, strict=True)
    ]
    private._foreach_copy_(copies, leaves)
    rows = zip(*(copy.unbind() for copy in copies), strict=True)
    return [_filled(stacked, iter(row)) for row, _ in zip(rows, range(count), strict=False)]


# Any: as `TensorsT`.
def _leaves(nested: Any) -> list[torch.Tensor]:
    """The leaves in the order of `tree_flatten`, which takes ten times as long."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    parts = nested.values() if isinstance(nested, dict) else nested
    return [leaf for part in parts for leaf in _leaves(part)]


# Any: as `TensorsT`.
def _filled(nested: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """The same nesting with other leaves, in the order of `_leaves`; `tree_unflatten` takes three times as long."""
    if isinstance(nested, torch.Tensor):
        return next(leaves)
    if isinstance(nested, dict):
        return {name: _filled(part, leaves) for name, part in nested.items()}
    return type(nested)(_filled(part, leaves) for part in nested)


def offsets(shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[list[int], int]:
    """The first byte of each tensor in a buffer, and the size of the buffer in bytes."""
    sizes = (-(-math.prod(shape) * dtype.itemsize // PAGE) * PAGE for shape, dtype in shapes)
    *starts, end = itertools.accumulate(sizes, initial=0)
    return starts, end


def pack(columns: Sequence[Sequence[torch.Tensor]], pinned: bool = False) -> torch.Tensor:
    """One buffer of bytes, uint8 [size], in which each column's tensors are stacked."""
    shapes = _stacked_shapes(columns)
    buffer = torch.empty(offsets(shapes)[1], dtype=torch.uint8, device=columns[0][0].device, pin_memory=pinned)
    rows = [row for leaf in unpack(buffer, shapes) for row in leaf.unbind()]
    private._foreach_copy_(rows, [tensor for column in columns for tensor in column])
    return buffer


def unpack(buffer: torch.Tensor, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """The tensors in a buffer, as views of it."""
    return [
        buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for start, (shape, dtype) in zip(offsets(shapes)[0], shapes, strict=True)
    ]


def _copied(columns: Sequence[Sequence[torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    """Each column, whose tensors lie in main memory, as one stacked tensor on the device."""
    if not columns:
        return []
    return unpack(upload(pack(columns, pinned=device.type == "cuda"), device), _stacked_shapes(columns))


def _stacked_shapes(columns: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(torch.Size([len(column), *column[0].shape]), column[0].dtype) for column in columns]
