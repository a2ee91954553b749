"""Examples with several inputs, a tuple or a dictionary of arrays: one row of numbers each, and how models get it.

The row has all numbers of an example one after another, as float32, so that the rest of rayfl sees a vector.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.errors import RayflError

EXACT = 2**24
"""Whole numbers up to this one are exact as float32."""
_TYPES = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float32}
"""The types of the inputs that models get, by the kinds of arrays."""

# Any: a tuple or a dictionary of what numpy turns into arrays.
Several = Any
"""The inputs of examples, each an array [n, ...]."""


@dataclass(frozen=True)
class InputLayout:
    """Where the inputs of an example are in its row.

    names: of the inputs, () if they are a tuple; shapes: of each for one example; kinds: of each array's type, as
    numpy's `dtype.kind`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: str

    @classmethod
    def of(cls, inputs: Several) -> "InputLayout":
        """The layout of arrays [n, ...]."""
        arrays = _arrays(inputs)
        names = tuple(inputs) if isinstance(inputs, Mapping) else ()
        return cls(names, tuple(array.shape[1:] for array in arrays), "".join(array.dtype.kind for array in arrays))

    @property
    def input_shape(self) -> Any:
        """The shapes as a model's class gets them: a tuple of shapes, or shapes by name."""
        return self._nested(self.shapes)

    def pack(self, place: str, inputs: Several) -> np.ndarray:
        """The rows of arrays, float32 [n, numbers]. RayflError, which begins with `place`, for arrays of another
        layout, of unequal lengths, or with numbers that float32 does not hold."""
        layout = InputLayout.of(inputs)
        if (layout.names, layout.shapes) != (self.names, self.shapes):
            raise RayflError(f"{place} has inputs {layout}, and others of {self}; give all one layout")
        arrays = _arrays(inputs)
        for name, array in zip(self._labels, arrays, strict=True):
            if array.dtype.kind not in _TYPES or not len(array) or len(array) != len(arrays[0]):
                raise RayflError(
                    f"{place} has {array.dtype} {list(array.shape)} as input {name}; give numbers, one row for each "
                    "example"
                )
            if array.dtype.kind in "iu" and max(-int(array.min()), int(array.max())) > EXACT:
                raise RayflError(f"{place} has a whole number above {EXACT} in input {name}; give smaller ones")
        return np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in arrays], axis=1)

    def columns(self, rows: np.ndarray) -> list[np.ndarray]:
        """The columns [n, numbers] of each input in rows."""
        return np.split(rows, np.cumsum([math.prod(shape) for shape in self.shapes])[:-1], axis=1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """The inputs [batch, ...] in rows [batch, numbers]: whole numbers as int64, others as float32."""
        sizes = [math.prod(shape) for shape in self.shapes]
        # Copies, since the numbers of a product depend on where its factors begin in memory.
        return self._nested(
            [
                part.to(_TYPES[kind], copy=True).reshape(len(rows), *shape)
                for part, kind, shape in zip(rows.split(sizes, dim=1), self.kinds, self.shapes, strict=True)
            ]
        )

    def arguments(self, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module's call: each input by its name or place if `forward` has such parameters, or else
        all as one tuple or dictionary."""
        inputs = self.unpack(rows)
        parameters = [*inspect.signature(module.forward).parameters.values()]
        kinds = [parameter.kind for parameter in parameters]
        if isinstance(inputs, dict):
            named = {parameter.name for parameter in parameters}
            by_name = named.issuperset(inputs) or inspect.Parameter.VAR_KEYWORD in kinds
            return ((), inputs) if by_name else ((inputs,), {})
        by_place = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) >= len(inputs)
        return (inputs if by_place or inspect.Parameter.VAR_POSITIONAL in kinds else (inputs,)), {}

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape in zip(self._labels, self.shapes, strict=True))

    @property
    def _labels(self) -> Sequence[str]:
        return self.names or [str(place) for place in range(len(self.shapes))]

    # Any: a tuple or a dictionary of what is given.
    def _nested(self, values: Sequence[Any]) -> Any:
        return dict(zip(self.names, values, strict=True)) if self.names else tuple(values)


def _arrays(inputs: Several) -> list[np.ndarray]:
    return [np.asarray(array) for array in (inputs.values() if isinstance(inputs, Mapping) else inputs)]


# Any: what a module's forward takes.
def arguments_of(
    module: nn.Module, inputs: Tensor, layout: InputLayout | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module's call for a batch: the batch itself, or its several inputs."""
    return ((inputs,), {}) if layout is None else layout.arguments(module, inputs)


# Any: what a source gives as inputs.
def are_several(inputs: Any) -> bool:
    """Whether these are several inputs: a dictionary, or a tuple of arrays."""
    return isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and all(hasattr(part, "shape") for part in inputs))
