"""Notices about columns that look like something that they are not used as: numbers, splits, identifiers."""

import re
from collections.abc import Sequence
from logging import WARNING

import numpy as np
import pyarrow as pa
from pyarrow import compute

from rayfl.data.sources.csv_files import GAPS
from rayfl.data.sources.splits import split_of
from rayfl.data.sources.table_columns import TableColumns, is_text
from rayfl.errors import log_once
from rayfl.settings import shown

_LOOKED_AT = 1000
"""The number of rows by which a column of texts is taken for numbers."""
_MOST = 0.9
_FEW_ROWS = 50
"""With fewer rows, whole numbers that are all different say nothing."""
_NUMERAL = (
    r"[-+\u2212]?[$\u20ac\u00a3]?\s*[-+\u2212]?"
    r"(\d+|\d{1,3}([.,' ]\d{3})+)?([.,]\d+)?([eE][-+]?\d+)?\s*[%$\u20ac\u00a3]?"
)
_IDENTIFIER = r"(.*[ _.-])?(id|index|row|row_?number|row_?id)|(.*[a-z])?(Id|ID|Index)|(?i:index|id|unnamed)"


def numbers_rows(table: TableColumns, name: str) -> bool:
    """Whether a column only tells rows apart: it is called ID, or alike, and has another whole number in each row."""
    if not re.fullmatch(_IDENTIFIER, name) or not pa.types.is_integer(table.kinds[name]):
        return False
    return len(table.raw(name).unique()) == table.table.num_rows > 1


def note_inputs(table: TableColumns, names: Sequence[str]) -> None:
    """Log a notice for the first column of a table if it is an input, and counts the rows or tells them apart."""
    first = table.table.column_names[0]
    if first not in names or not pa.types.is_integer(table.kinds[first]) or table.raw(first).null_count:
        return
    values = table.raw(first).to_numpy(zero_copy_only=False)
    if len(values) > 1 and values[0] in (0, 1) and (values == values[0] + np.arange(len(values))).all():
        log_once(
            WARNING,
            f"{table.path}: column {first!r} is an input and counts the rows; if it is their number, name the "
            "inputs in data.features without it",
        )
    elif len(values) >= _FEW_ROWS and len(np.unique(values)) >= _MOST * len(values):
        log_once(
            WARNING,
            f"{table.path}: column {first!r} is an input and has another whole number in nearly each row; if it only "
            "tells rows apart, name the inputs in data.features without it",
        )


def note_texts(table: TableColumns, names: Sequence[str], split: str | None) -> None:
    """Log a notice for each column of texts that are nearly all numbers, and one for a column that names splits."""
    for name in names:
        kind = table.kinds[name]
        if not is_text(kind):
            continue
        values = [value.strip() for value in table.raw(name)[:_LOOKED_AT].to_pylist() if value is not None]
        values = [value for value in values if value not in GAPS]
        odd = [value for value in values if not re.fullmatch(_NUMERAL, value)]
        plain = [value for value in values if re.fullmatch(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", value)]
        if values and len(odd) <= (1 - _MOST) * len(values):
            marked = [value for value in values if value not in {*plain}]
            cause = "as its numbers are written as texts"
            if odd or marked:
                row = table.raw(name).to_pylist().index((odd or marked)[0])
                cause = f"as it has {shown((odd or marked)[0])} in row {row} (counted from 0) among its numbers"
            log_once(
                WARNING,
                f"{table.path}: column {name!r} is text and no input, {cause}; write plain numbers, such as 1234.5, "
                "and nothing where one is missing",
            )
    if split is None:
        for name in table.table.column_names:
            if is_text(table.kinds[name]) and _names_splits(table, name):
                log_once(
                    WARNING,
                    f"{table.path}: column {name!r} says which rows are train and test, and is not used; "
                    f"set data.split={name!r}",
                )


def _names_splits(table: TableColumns, name: str) -> bool:
    """Whether all values of a column of texts name splits, and not only one."""
    values = [value for value in compute.call_function("unique", [table.raw(name)]).to_pylist() if value is not None]
    splits = {split_of(value) for value in values[:10]}
    return len(values) <= 10 and len(splits) > 1 and None not in splits
