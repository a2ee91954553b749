"""A user's own table: a CSV or Parquet file with a column of labels, or columns of numbers to predict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.data.sources.conversion import dataset
from rayfl.errors import RayflError, did_you_mean
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, reading, require_regular
from rayfl.settings import listed, shown

_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""The names that pandas gives to an index without a name: in a CSV file, read back from one, in a Parquet file."""

EXACT = 2**53
"""Up to this size all whole numbers are float64 numbers."""


class Table(Source):
    """A CSV file with a header, or a Parquet file: one example per row, with a column of labels and columns of numbers.

    Labels are whole numbers from 0 or names of classes; each owner is a natural client. Columns of texts and the index
    that pandas writes are not inputs unless a setting names them. Each category becomes an input per value, which is 1
    in the rows that have the value and 0 in all others.
    """

    name = "table"
    path: str = Field(min_length=1, examples=["my_table.csv"], description="a .csv or .parquet file")
    test_path: str | None = Field(default=None, description="a second file to test on; default: a share of the first")
    labels: str = Field(default="label", description="the column of labels")
    targets: tuple[str, ...] = Field(
        default=(), description="columns of numbers to predict instead of labels (regression; multilabel if 0 and 1)"
    )
    features: tuple[str, ...] = Field(
        default=(), description="columns of inputs; default: all other columns of numbers except pandas' index"
    )
    categories: tuple[str, ...] = Field(default=(), description="columns that become an input per value, 0 or 1")
    owners: str | None = Field(default=None, description="the column with the owner of each example")
    standardise: bool = Field(
        default=True, description="shift and scale inputs to mean 0 and deviation 1 of train; categories stay 0 and 1"
    )
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test_path")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a file or a column is missing, or if an input is not a number."""
        file = _File(self.path, "data.path")
        columns = self._columns(file)
        values = {name: np.unique(file.column(name)) for name in self.categories}
        train = self._rows(file, columns["inputs"], values)
        test = None
        if self.test_path is not None:
            test = self._rows(_File(self.test_path, "data.test_path"), columns["inputs"], values)
        numbers = [name not in values for name in columns["inputs"]]
        names = [
            [f"{name}={value}" for value in values[name]] if name in values else [name] for name in columns["inputs"]
        ]
        is_number = np.repeat(numbers, [*map(len, names)])
        scaled = is_number if self.standardise else None
        rows = dataset(
            self.name, self.path, train, test, self.test_share, kind="vector", classes=self.targets, scaled=scaled
        )
        return replace(rows, columns=columns, input_names=[*chain.from_iterable(names)])

    def unused(self) -> Mapping[str, str]:
        return {"labels": f"beside targets={shown(self.targets)}"} if self.targets else {}

    @property
    def _predicted(self) -> list[str]:
        """The columns of labels."""
        return [*(self.targets or (self.labels,))]

    def _columns(self, file: "_File") -> dict[str, list[str]]:
        """The names of the columns by their use: "inputs", or why they are not inputs."""
        for name in self._predicted:
            if name in (*self.features, *self.categories):
                raise RayflError(f"{self.path}: {name!r} is a column of labels; remove it from the inputs")
        index = _pandas_index(file.table.schema)
        columns: dict[str, list[str]] = {"inputs": [*self.features]}
        for field in file.table.schema:
            if field.name not in self.features:
                columns.setdefault(self._use(field, field.name in index), []).append(field.name)
        if not columns["inputs"]:
            raise RayflError(
                f"{self.path} has no column of numbers beside {listed([*map(repr, self._predicted)], 'and')}; give "
                "data.features, or data.categories"
            )
        return columns

    def _use(self, field: pa.Field, is_index: bool) -> str:
        """ "inputs", or why a column that is not among the features is not an input."""
        kind = field.type
        uses = [
            (field.name in self.categories, "inputs"),
            (field.name in self._predicted, "labels"),
            (field.name == self.owners, "owners"),
            (self.features, "not in data.features"),
            (is_index, "pandas' index"),
            (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind), "inputs"),
            (pa.types.is_null(kind), "empty"),
            (pa.types.is_string(kind) or pa.types.is_large_string(kind), "text, and not in data.categories"),
            (pa.types.is_dictionary(kind), "text, and not in data.categories"),
        ]
        return next((use for applies, use in uses if applies), f"of type {kind}")

    def _rows(self, file: "_File", names: Sequence[str], values: Mapping[str, np.ndarray]) -> Examples:
        owners = None if self.owners is None else file.column(self.owners)
        labels = file.inputs(self.targets, {}) if self.targets else file.column(self.labels)
        return Examples(file.inputs(names, values), labels, owners, file.path)


class _File:
    """A table, and its path for the sentences of errors."""

    def __init__(self, path: str, setting: str) -> None:
        self.path = path
        self.table = read(path, setting)

    def column(self, name: str) -> np.ndarray:
        """The numbers or texts of a column. Raise RayflError if the column is missing, there twice or lacks values."""
        try:
            # Any: what a dictionary or a text column holds.
            values: Any = self.table.column(name).combine_chunks()
        except KeyError as error:
            names = self.table.column_names
            advice = "rename one" if name in names else did_you_mean(name, names)
            raise RayflError(f"{self.path}: {error.args[0]}: {advice}") from None
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        row = values.is_null().index(True).as_py() if values.null_count else -1
        if row < 0 and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            # A gap in a CSV column of texts is an empty text.
            row = values.index("").as_py()
        if row >= 0:
            raise RayflError(
                f"{self.path} has nothing in column {name!r} of row {row} (counted from 0); fill it, or drop it"
            )
        return values.to_numpy(zero_copy_only=False)

    def inputs(self, names: Sequence[str], values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inputs, float64 [rows, inputs]: a column of numbers is one, a category one for each of its `values`."""
        width = sum(len(values.get(name, "1")) for name in names)
        memory.require(8 * self.table.num_rows * width, f"{self.path} with {width} inputs", "name fewer columns")
        inputs = np.empty((self.table.num_rows, width))
        start = 0
        for name in names:
            part = self._one_hot(name, values[name]) if name in values else self._numbers(name)[:, None]
            inputs[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return inputs

    def _numbers(self, name: str) -> np.ndarray:
        values = self.column(name)
        if values.dtype.kind not in "biuf":
            raise RayflError(
                f"{self.path} has {shown(values[0])} in column {name!r}; inputs and targets are columns of numbers, "
                "and other inputs are in data.categories"
            )
        if values.dtype.kind in "iu" and _collapse(values):
            raise RayflError(
                f"{self.path} has whole numbers above 2^53 in column {name!r}, some of which become equal as float64; "
                "leave it out of data.features, or subtract a constant"
            )
        return values

    def _one_hot(self, name: str, values: np.ndarray) -> np.ndarray:
        column = self.column(name)
        if len(strange := np.setdiff1d(column, values)):
            raise RayflError(
                f"{self.path} has {shown(strange.tolist()[0])} in column {name!r}, which no train example has; leave "
                "these rows out"
            )
        return column[:, None] == values


def _collapse(values: np.ndarray) -> bool:
    """Whether different whole numbers are one as float64."""
    if not len(values) or max(-int(values.min()), int(values.max())) <= EXACT:
        return False
    return len(np.unique(values)) > len(np.unique(values.astype(np.float64)))


def _pandas_index(schema: pa.Schema) -> set[str]:
    """The columns that pandas wrote for the index of a frame, by the schema's note of it or by their names."""
    try:
        # Any: what a file's JSON says.
        noted: Any = (schema.pandas_metadata or {}).get("index_columns", [])
    except (ValueError, AttributeError):
        noted = []
    named = {entry for entry in noted if isinstance(entry, str)} if isinstance(noted, list) else set()
    return named | {name for name in schema.names if _INDEX.fullmatch(name)}


def read(path: str, setting: str) -> pa.Table:
    """Read a CSV or Parquet file. Raise RayflError if it cannot be read."""
    file = expanded(path)
    if file.suffix not in (".csv", ".parquet"):
        raise RayflError(f"{setting}={path!r} is not allowed; it must be a .csv or a .parquet file")
    with reading(file, f"give {setting} the path of a .csv or .parquet file", pa.ArrowException):
        require_regular(file)
        if file.suffix == ".csv":
            return csv.read_csv(file)
        groups = parquet.read_metadata(file)
        unpacked = sum(groups.row_group(group).total_byte_size for group in range(groups.num_row_groups))
        memory.require(unpacked, path, "give less data")
        return parquet.read_table(file)
