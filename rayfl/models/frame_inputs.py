"""Rows of raw inputs from a data frame, by the names of its columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.errors import RayflError, did_you_mean
from rayfl.settings import shown

if TYPE_CHECKING:
    # Every run loads all files of models, and pandas takes 60 MB.
    import pandas as pd

GAP = "?"
"""The value in the name of an input that says that a column has a gap, such as "age=?"."""


def rows_of_frame(frame: "pd.DataFrame", names: Sequence[str], means: Sequence[float] = ()) -> np.ndarray:
    """The inputs called `names` of the rows of a frame, float64 [rows, inputs]; its other columns are left out.

    A column of numbers is an input; of lists, "column[0]", "column[1]", ...; a category has an input of 0 or 1 for each
    value, "column=value". means: of each input, in place of missing numbers. Raise RayflError for a missing column,
    a gap that nothing fills, and a value of a category that has no input.
    """
    frame = frame.rename(columns=str)
    inputs = np.empty((len(frame), len(names)))
    known: dict[str, np.ndarray] = {}
    for place, name in enumerate(names):
        # Names and values may have signs of equality, too.
        column = max((key for key in frame.columns if name.startswith(f"{key}=")), key=len, default=None)
        listed, _, position = name.removesuffix("]").rpartition("[")
        if name in frame.columns:
            inputs[:, place] = _numbers(frame, name, means[place] if means else None)
        elif column is not None:
            inputs[:, place] = _is_value(frame[column], name.removeprefix(f"{column}="))
            if column not in names:
                known[column] = known.get(column, np.zeros(len(frame), dtype=bool)) | (inputs[:, place] > 0)
        elif position.isdecimal() and listed in frame.columns:
            inputs[:, place] = [np.ravel(entry)[int(position)] for entry in frame[listed]]
        else:
            wanted = name.partition("=")[0]
            raise RayflError(f"inputs have no column {wanted!r}: {did_you_mean(wanted, frame.columns)}")
    for column, is_known in known.items():
        if not is_known.all():
            row = int((~is_known).argmax())
            values = [name.removeprefix(f"{column}=") for name in names if name.startswith(f"{column}=")]
            raise RayflError(
                f"inputs have {shown(frame[column].tolist()[row])} in column {column!r} of row {row} (counted from 0), "
                f"which no train example has; known are: {', '.join(values)}"
            )
    return inputs


def _numbers(frame: "pd.DataFrame", name: str, mean: float | None) -> np.ndarray:
    """The numbers of a column; `mean` in place of missing ones."""
    try:
        numbers = frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError):
        raise RayflError(f"inputs have a column {name!r} of type {frame[name].dtype}; give numbers") from None
    gaps = np.isnan(numbers)
    if gaps.any() and mean is None:
        raise RayflError(f"inputs have no number in column {name!r} of row {int(gaps.argmax())} (counted from 0)")
    numbers = numbers.copy()
    numbers[gaps] = mean
    return numbers


# Any: a column of a frame, of which type checkers cannot know that it is one.
def _is_value(column: Any, value: str) -> np.ndarray:
    """Which rows have a category's value, bool [rows]."""
    gaps = column.isna().to_numpy()
    if value == GAP:
        return gaps
    return ~gaps & np.array([str(entry) == value or _same_number(entry, value) for entry in column])


# Any: an entry of a frame.
def _same_number(entry: Any, value: str) -> bool:
    """Whether a number of a frame, which pandas may have made a float, is that of a value."""
    try:
        return not isinstance(entry, str | bool | np.bool_) and float(entry) == float(value)
    except (ValueError, TypeError):
        return False
