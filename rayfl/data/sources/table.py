"""A user's own table: a file with a column of labels, or with columns of numbers to predict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.data.datasets import Dataset, Examples, Field
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.table_columns import Missing, TableColumns, TableSource, is_list, is_number, is_text
from rayfl.data.sources.table_labels import labels_of
from rayfl.data.sources.table_notices import note_inputs, note_texts, numbers_rows
from rayfl.errors import RayflError
from rayfl.settings import listed, shown

IDENTIFIERS = "numbers of rows, not in data.features"
TEXT = "text, and not in data.categories"
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""The names that pandas gives to an index without a name: in a CSV file, read back from one, in a Parquet file."""


class Table(TableSource):
    """A table with one example per row: a column of labels and columns of numbers, which are the inputs.

    Files are CSV, JSON, JSON lines, Parquet or Feather, or folders of them. Labels are whole numbers from 0 or names of
    classes; each owner is a natural client. Columns of texts and the index that pandas writes are not inputs unless a
    setting names them. Each category becomes an input per value, which is 1 in the rows that have the value and 0 in
    all others. Lists of numbers of one length (embeddings) are an input per place; `targets` may be one column of
    lists of classes.

    missing: "drop" leaves out rows with a gap in a column that is used. "mean" replaces missing numbers by the mean of
    train, and makes gaps in a category a value of its own. "category" does both, and each column of numbers with gaps
    gets a further input, which is 1 where there is a gap.
    """

    name = "table"
    targets: tuple[str, ...] = Field(
        default=(), description="columns of numbers to predict instead of labels (regression; multilabel if 0 and 1)"
    )
    features: tuple[str, ...] = Field(
        default=(), description="columns of inputs; default: all other columns of numbers except pandas' index"
    )
    categories: tuple[str, ...] = Field(default=(), description="columns that become an input per value, 0 or 1")
    missing: Missing = Field(default="refuse", description="what is done about missing values")
    standardise: bool = Field(
        default=True, description="shift and scale inputs to mean 0 and deviation 1 of train; categories stay 0 and 1"
    )

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a file or a column is missing, or if an input is not a number."""
        train, test = self.read(self.missing)
        columns = self._columns(train)
        used = [*columns["inputs"], *self._predicted, *([self.owners] if self.owners else [])]
        if self.missing == "drop":
            train, test = train.without_gaps(used), None if test is None else test.without_gaps(used)
        values = {name: train.categories(name) for name in self.categories}
        marked = self._marked(train, columns["inputs"])
        rows, test_rows = (
            split and self._rows(split, train, columns["inputs"], values, marked) for split in (train, test)
        )
        assert rows is not None
        names, is_scaled = _input_names(train, columns["inputs"], values)
        names += [f"{name}=?" for name in marked]
        scaled = np.array([*is_scaled, *(False for _ in marked)])
        examples = dataset(
            self.name,
            self.path,
            rows,
            test_rows,
            self.test_share,
            kind="vector",
            classes=self._class_names(train),
            scaled=scaled if self.standardise else None,
            fit=partial(_filled, self.path) if self.missing in ("mean", "category") else None,
        )
        return replace(examples, columns=columns, input_names=names)

    def names(self) -> tuple[str, ...]:
        labels = () if self.targets else (self.labels,)
        return (*labels, *self.categories, *super().names()[1:])

    def unused(self) -> Mapping[str, str]:
        of_labels = ("labels", "named_labels") if self.targets else ()
        return {**super().unused(), **dict.fromkeys(of_labels, f"beside targets={shown(self.targets)}")}

    @property
    def _predicted(self) -> list[str]:
        """The columns of labels."""
        return [*(self.targets or (self.labels,))]

    def _columns(self, train: TableColumns) -> dict[str, list[str]]:
        """The names of the columns by their use: "inputs", or why they are not inputs."""
        for name in self._predicted:
            if name in (*self.features, *self.categories):
                raise RayflError(f"{self.path}: {name!r} is a column of labels; remove it from the inputs")
            train.raw(name)
        index = _pandas_index(train.table.schema)
        columns: dict[str, list[str]] = {"inputs": [*self.features]}
        for field in train.table.schema:
            if field.name not in self.features:
                columns.setdefault(self._use(train, field, field.name in index), []).append(field.name)
        if not columns["inputs"]:
            columns["inputs"] = columns.pop(IDENTIFIERS, [])
        note_texts(train, columns.get(TEXT, []), self.split)
        if not columns["inputs"]:
            others = [f"{name!r} is {use}" for use, names in columns.items() for name in names if use != "labels"]
            raise RayflError(
                f"{self.path} has no column of numbers beside {listed([*map(repr, self._predicted)], 'and')}"
                f"{' (' + ', '.join(others[:3]) + ')' if others else ''}; give data.features, or data.categories; for "
                "images set data.name='image-table', for texts 'text-table'"
            )
        if not self.features:
            note_inputs(train, columns["inputs"])
        return columns

    def _use(self, train: TableColumns, field: pa.Field, is_index: bool) -> str:
        """ "inputs", or why a column that is not among the features is not an input."""
        kind = field.type
        uses = [
            (field.name in self.categories, "inputs"),
            (field.name in self._predicted, "labels"),
            (field.name == self.owners, "owners"),
            (field.name == self.split, "split"),
            (self.features, "not in data.features"),
            (is_index, "pandas' index"),
            (numbers_rows(train, field.name), IDENTIFIERS),
            (is_number(kind), "inputs"),
            (pa.types.is_null(kind), "empty"),
            (is_text(kind), TEXT),
            (pa.types.is_dictionary(kind), TEXT),
            (is_list(kind) and train.width(field.name), "inputs"),
        ]
        return next((use for applies, use in uses if applies), f"of type {kind}")

    def _marked(self, train: TableColumns, inputs: Sequence[str]) -> list[str]:
        """The columns of numbers whose gaps have an input of their own."""
        numbers = [name for name in inputs if name not in self.categories] if self.missing == "category" else []
        return [name for name in numbers if train.gaps(name).any()]

    def _rows(
        self,
        split: TableColumns,
        train: TableColumns,
        inputs: Sequence[str],
        values: Mapping[str, Sequence[object]],
        marked: Sequence[str],
    ) -> Examples:
        numbers = np.column_stack([split.inputs(inputs, values), *(split.gaps(name) for name in marked)])
        return Examples(numbers, self._labels(split, train), self.owners_of(split), split.path)

    def _labels(self, split: TableColumns, train: TableColumns) -> np.ndarray:
        if not self.targets:
            cure = f"give data.targets=[{self.labels!r}] for several labels, or numbers, of each example"
            return labels_of(self, split, train, cure)
        if len(self.targets) == 1 and (lists := split.label_lists(self.targets[0], train)) is not None:
            return lists[0]
        # A target is never filled.
        for name in self.targets:
            split.refuse_gaps(name)
        return TableColumns(split.path, split.table, "refuse").inputs(self.targets, {})

    # Any: see `label_lists`.
    def _class_names(self, train: TableColumns) -> Sequence[str]:
        if not self.targets:
            return train.class_names(self.labels)
        lists: Any = train.label_lists(self.targets[0], train) if len(self.targets) == 1 else None
        return _input_names(train, self.targets, {})[0] if lists is None else lists[1]


def _filled(place: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with the mean of train in place of NaN. Raise RayflError if a column of train has nothing else."""
    empty = np.isnan(train).all(axis=0)
    if empty.any():
        raise RayflError(f"{place} has no train example with a number for input {int(empty.argmax())}, counted from 0")
    means = np.nanmean(train, axis=0)
    return np.where(np.isnan(train), means, train), np.where(np.isnan(test), means, test)


def _input_names(
    train: TableColumns, inputs: Sequence[str], values: Mapping[str, Sequence[object]]
) -> tuple[list[str], list[bool]]:
    """The name of each input, and whether it is a number that is standardised."""
    names, is_scaled = list[str](), list[bool]()
    for column in inputs:
        if column in values:
            of_column = [f"{column}={'?' if value is None else value}" for value in values[column]]
        elif is_list(train.kinds[column]):
            of_column = [f"{column}[{place}]" for place in range(train.width(column))]
        else:
            of_column = [column]
        names += of_column
        is_scaled += [column not in values] * len(of_column)
    return names, is_scaled


def _pandas_index(schema: pa.Schema) -> set[str]:
    """The columns that pandas wrote for the index of a frame, by the schema's note of it or by their names."""
    try:
        # Any: what a file's JSON says.
        noted: Any = (schema.pandas_metadata or {}).get("index_columns", [])
    except (ValueError, AttributeError):
        noted = []
    named = {entry for entry in noted if isinstance(entry, str)} if isinstance(noted, list) else set()
    return named | {name for name in schema.names if _INDEX.fullmatch(name)}
