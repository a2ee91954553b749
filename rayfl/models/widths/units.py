"""Units: channels and hidden units, and which of them are the same because layers share them.

Each position of each axis of a parameter begins as a unit of its own. Tracing joins units that must be kept or left out
together; unit `WHOLE` is kept by all, and what joins it is never cut.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

WHOLE = 0
"""The unit that every sub-model keeps."""
Axis = np.ndarray | None
"""The unit at each position of an axis, int64; None if no position is a unit (the axis is whole)."""
Axes = list[Axis]
"""The units of a tensor, axis by axis."""


class Units:
    """Sets of joined units (union-find); the smallest unit stands for its set, so `WHOLE` for all that joined it."""

    def __init__(self) -> None:
        self._parent = np.zeros(1, np.int64)

    def new(self, count: int) -> np.ndarray:
        """`count` new units, int64 [count]."""
        first = len(self._parent)
        self._parent = np.concatenate([self._parent, np.arange(first, first + count)])
        return np.arange(first, first + count)

    def sets(self, units: np.ndarray) -> np.ndarray:
        """The unit that stands for the set of each."""
        while not np.array_equal(units, above := self._parent[units]):
            units = above
        return units

    def join(self, a: np.ndarray, b: np.ndarray) -> None:
        """Join the units at equal positions."""
        left, right = self.sets(a), self.sets(b)
        while not np.array_equal(left, right):
            pairs = np.unique(np.stack([np.minimum(left, right), np.maximum(left, right)]), axis=1)
            pairs = pairs[:, pairs[0] != pairs[1]]
            # Of several smaller ones the last is written; the others are joined in the next pass.
            self._parent[pairs[1]] = pairs[0]
            left, right = self.sets(left), self.sets(right)

    def joined(self, axes: Sequence[Axis], size: int) -> Axis:
        """One axis of `size` positions for several that are added or multiplied position by position."""
        if all(axis is None for axis in axes):
            return None
        first, *others = [np.full(size, WHOLE) if axis is None else axis for axis in axes]
        for other in others:
            self.join(first, other)
        return first

    def keep_whole(self, axis: Axis) -> None:
        """Keep all units of an axis in every sub-model."""
        if axis is not None:
            self.join(axis, np.full(len(axis), WHOLE))

    def is_cut(self, axis: Axis) -> bool:
        """Whether a sub-model may leave out a position of the axis."""
        return axis is not None and bool((self.sets(axis) != WHOLE).any())


class Layouts:
    """The units along the axes of all tensors of a forward pass.

    multiples: for each unit that a group norm divides, the number of groups. marks: the units of which an operator
    takes only a part of an axis, an array for each such operator.
    """

    def __init__(self) -> None:
        self.units = Units()
        self.multiples: dict[int, int] = {}
        self.marks: list[np.ndarray] = []
        self._known: dict[tuple[object, ...], tuple[Axes, Tensor]] = {}

    def axes(self, tensor: Tensor) -> Axes:
        """The units of a tensor; None for axes that are whole."""
        known = self._known.get(place_of(tensor))
        return [axis if self.units.is_cut(axis) else None for axis in known[0]] if known else [None] * tensor.dim()

    def note(self, tensor: Tensor, axes: Axes) -> None:
        """Remember the units of a tensor. It is kept, since memory that is freed may become another tensor's."""
        self._known[place_of(tensor)] = axes, tensor

    def forget(self, tensor: Tensor) -> None:
        """The tensor is whole: its memory may have had another one."""
        self._known.pop(place_of(tensor), None)

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether a sub-model may leave out a part of the tensor."""
        return any(axis is not None for axis in self.axes(tensor))

    def keep_whole(self, axes: Sequence[Axis]) -> None:
        """Keep all units of some axes in every sub-model."""
        for axis in axes:
            self.units.keep_whole(axis)


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """What tells a tensor from others: its memory, and how it lies in it."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
