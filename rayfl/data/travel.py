"""Tensors on their way between main memory and a device: as one buffer, however many there are."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rayfl.data.device import upload

PAGE = 256
"""Bytes from one leaf's place in the buffer to the next are a multiple of this, as in CUDA's own allocations."""


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


def stacked_there(columns: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Each column as one tensor on the device. Columns that lie in main memory travel as one buffer."""
    here = [all(tensor.device.type == "cpu" for tensor in column) for column in columns]
    arrived = iter(_sent([column for column, travels in zip(columns, here, strict=True) if travels], device))
    return [
        next(arrived) if travels else torch.stack([upload(tensor, device) for tensor in column])
        for column, travels in zip(columns, here, strict=True)
    ]


def there(leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The leaves on the device: those that lie there as they are, the others by one copy of one buffer."""
    arrived = iter(_sent([[leaf] for leaf in leaves if leaf.device.type != device.type], device))
    return [next(arrived)[0] if leaf.device.type != device.type else leaf for leaf in leaves]


def landed(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves in main memory: those that lie there as they are, the others by one copy of one buffer."""
    travel = [leaf for leaf in leaves if leaf.device.type != "cpu"]
    if not travel:
        return list(leaves)
    shapes = [(torch.Size([1, *leaf.shape]), leaf.dtype) for leaf in travel]
    arrived = iter(unpacked(packed([[leaf] for leaf in travel]).cpu(), shapes))
    return [next(arrived)[0] if leaf.device.type != "cpu" else leaf for leaf in leaves]


def _sent(columns: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    if not columns:
        return []
    shapes = [(torch.Size([len(column), *column[0].shape]), column[0].dtype) for column in columns]
    return unpacked(upload(packed(columns), device), shapes)
