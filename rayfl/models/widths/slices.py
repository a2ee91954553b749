"""Slices: which positions of each parameter a sub-model keeps, from the units that it keeps.

A group is an ordered list of units that are cut alike (the channels of a residual stream, the units of a hidden layer,
those of each head). A sub-model keeps `UnitGroup.kept(ratio)` of a group's units, in any order: unit `kept[a]` of the
full model is unit a of the narrow one.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayfl.errors import RayflError
from rayfl.models.widths.tracing import Traced
from rayfl.models.widths.units import WHOLE, Axis
from rayfl.tree import Index

Shape = tuple[int, ...]
Sizes = tuple[int, ...]
"""The number of units in each group."""


@dataclass(frozen=True)
class UnitGroup:
    """A list of `width` units that are cut alike, named after the first axis that has them ("fc1.weight axis 0").

    multiple: number of the groups of a group norm, which must divide the number of units that are kept.
    """

    name: str
    width: int
    multiple: int = 1

    def kept(self, ratio: float) -> int:
        """The number of units at a ratio: ceil(ratio width), and at least 1, raised to a multiple of `multiple`."""
        # ratio * width may be rounded up: 0.07 * 100 is 7.000000000000001.
        least = max(1, math.ceil(ratio * self.width - 1e-9))
        raised = self.multiple * math.ceil(least / self.multiple)
        return self.width if self.width % self.multiple or raised > self.width else raised


class CutAxis(NamedTuple):
    """The positions [n] of an axis: each one's group (-1: whole), its unit's rank in the group, and how many earlier
    positions have the same unit. tables: by group, the positions of each unit, [width, positions of a unit]."""

    groups: np.ndarray
    ranks: np.ndarray
    repeats: np.ndarray
    tables: Mapping[int, np.ndarray]

    def kept(self, units: Sequence[np.ndarray]) -> np.ndarray:
        """The positions that a slice with `units` of each group keeps, in the narrow network's order.

        The order of the first units of each group, with each unit replaced by the one that is kept in its place.
        """
        sizes = np.array([*map(len, units), 0])
        template = np.flatnonzero((self.groups < 0) | (self.ranks < sizes[self.groups]))
        positions = template.copy()
        for number, table in self.tables.items():
            is_in_group = self.groups[template] == number
            places = template[is_in_group]
            positions[is_in_group] = table[units[number][self.ranks[places]], self.repeats[places]]
        return positions

    def among(self, held: Sequence[np.ndarray]) -> np.ndarray:
        """[rounds, n] from [rounds, units] of each group: what holds for each position's unit; 1 where it is whole."""
        result = np.ones((len(held[0]), len(self.groups)), np.float32)
        for number, table in self.tables.items():
            result[:, table] = held[number][:, :, None]
        return result


@dataclass(frozen=True, eq=False)
class Widths:
    """The groups of a model, and how each axis of its parameters and of its layers' tensors consists of them."""

    groups: tuple[UnitGroup, ...]
    shapes: Mapping[str, Shape]
    weights: Mapping[str, tuple[CutAxis | None, ...]]
    layers: Mapping[str, tuple[tuple[Shape, tuple[CutAxis | None, ...]], ...]] = field(repr=False)

    def sizes(self, ratio: float) -> Sizes:
        """The number of units of each group that a sub-model of this ratio keeps."""
        return tuple(group.kept(ratio) for group in self.groups)

    def first(self, ratio: float) -> list[np.ndarray]:
        """The first units of each group, in ascending order."""
        return [np.arange(size) for size in self.sizes(ratio)]

    def index(self, units: Sequence[np.ndarray]) -> Index:
        """The positions of every parameter, for the units of each group, int64 without repetition."""
        return {
            name: tuple(None if axis is None else axis.kept(units) for axis in axes)
            for name, axes in self.weights.items()
        }

    def narrow_shapes(self, sizes: Sequence[int]) -> dict[str, Shape]:
        """The shapes of all tensors of the narrow network."""
        units = [np.arange(size) for size in sizes]
        return {name: _narrow(self.shapes[name], axes, units) for name, axes in self.weights.items()}

    def layer_shapes(self, name: str, sizes: Sequence[int]) -> tuple[Shape, Shape] | None:
        """The shapes of a layer's input and output in the narrow network, for two examples; None if it never ran."""
        if name not in self.layers:
            return None
        units = [np.arange(size) for size in sizes]
        (given, before), (made, after) = self.layers[name]
        return _narrow(given, before, units), _narrow(made, after, units)

    def sizes_of(self, shapes: Mapping[str, Shape]) -> Sizes:
        """The sizes of the groups in the narrow network whose parameters have these shapes.

        Of an axis of which only one group's size is not known yet, the length says it. Raise RayflError if there is no
        such network.
        """
        known: dict[int, int] = {}
        axes = [
            (axis, shape[number])
            for name, shape in shapes.items()
            for number, axis in enumerate(self.weights.get(name, ()))
            if axis is not None
        ]
        before = -1
        while len(known) > before:
            before = len(known)
            for axis, length in axes:
                unknown = [number for number in axis.tables if number not in known]
                if len(unknown) == 1:
                    taken = sum(
                        known[number] * table.shape[1] for number, table in axis.tables.items() if number in known
                    )
                    left = length - int((axis.groups < 0).sum()) - taken
                    known[unknown[0]] = left // axis.tables[unknown[0]].shape[1]
        sizes = tuple(known.get(number, group.width) for number, group in enumerate(self.groups))
        if all(0 < size <= group.width for size, group in zip(sizes, self.groups, strict=True)):
            wanted = self.narrow_shapes(sizes)
            if all(wanted.get(name, shape) == shape for name, shape in shapes.items()):
                return sizes
        raise RayflError("the parameters have the shapes of no sub-model of the network")

    @property
    def cut(self) -> frozenset[str]:
        """The names of the tensors that a sub-model cuts."""
        return frozenset(name for name, axes in self.weights.items() if any(axis is not None for axis in axes))


def _narrow(shape: Shape, axes: Sequence[CutAxis | None], units: Sequence[np.ndarray]) -> Shape:
    return tuple(size if axis is None else len(axis.kept(units)) for size, axis in zip(shape, axes, strict=True))


def widths(traced: Traced, shapes: Mapping[str, Shape]) -> Widths:
    """The groups of a traced model; `shapes`: of its parameters and buffers."""
    units = traced.layouts.units
    places = defaultdict[int, list[tuple[int, int]]](list)
    names: list[str] = []
    for name, axes in traced.weights.items():
        for number, axis in enumerate(axes):
            if axis is None:
                continue
            names.append(f"{name} axis {number}")
            for position, unit in enumerate(units.sets(axis).tolist()):
                if unit != WHOLE:
                    places[unit].append((len(names) - 1, position))
    marks = defaultdict[int, set[int]](set)
    for number, marked in enumerate(traced.layouts.marks):
        for unit in units.sets(marked).tolist():
            marks[unit].add(number)
    alike = defaultdict[object, list[int]](list)
    for unit, of_unit in places.items():
        by_axis = defaultdict[int, int](int)
        for axis_number, _ in of_unit:
            by_axis[axis_number] += 1
        alike[tuple(sorted(by_axis.items())), frozenset(marks[unit])].append(unit)
    multiples = defaultdict[int, int](lambda: 1)
    for unit, multiple in traced.layouts.multiples.items():
        joined = int(units.sets(np.array([unit]))[0])
        multiples[joined] = math.lcm(multiples[joined], multiple)
    groups: list[UnitGroup] = []
    rank_of: dict[int, tuple[int, int]] = {}
    for number, members in enumerate(sorted(alike.values(), key=lambda members: min(places[unit] for unit in members))):
        ordered = sorted(members, key=lambda unit: places[unit][0])
        multiple = math.lcm(*(multiples[unit] for unit in ordered))
        groups.append(UnitGroup(names[places[ordered[0]][0][0]], len(ordered), multiple))
        rank_of |= {unit: (number, rank) for rank, unit in enumerate(ordered)}

    def laid_out(axes: Sequence[Axis]) -> tuple[CutAxis | None, ...]:
        return tuple(_cut_axis(None if axis is None else units.sets(axis), rank_of) for axis in axes)

    return Widths(
        tuple(groups),
        {name: shapes[name] for name in traced.weights},
        {name: laid_out(axes) for name, axes in traced.weights.items()},
        {
            name: tuple((shape, laid_out(axes)) for shape, axes in both)
            for name, both in traced.layers.items()
            if any(units.is_cut(axis) for _, axes in both for axis in axes)
        },
    )


def _cut_axis(axis: Axis, rank_of: Mapping[int, tuple[int, int]]) -> CutAxis | None:
    """An axis by the groups of its units, given by the unit that stands for each; None if it is whole."""
    if axis is None or not any(unit in rank_of for unit in axis.tolist()):
        return None
    of_positions = [rank_of.get(unit, (-1, 0)) for unit in axis.tolist()]
    groups, ranks = (np.array(column, np.int64) for column in zip(*of_positions, strict=True))
    repeats = np.zeros(len(axis), np.int64)
    tables: dict[int, np.ndarray] = {}
    for number in np.unique(groups[groups >= 0]).tolist():
        positions = np.flatnonzero(groups == number)
        # By unit, and positions of a unit in their order.
        table = positions[np.argsort(ranks[positions], kind="stable")].reshape(int(ranks[positions].max()) + 1, -1)
        repeats[table] = np.arange(table.shape[1])
        tables[number] = table
    return CutAxis(groups, ranks, repeats, tables)
