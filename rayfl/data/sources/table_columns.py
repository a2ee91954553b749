"""The columns of a table as arrays: labels, owners, numbers and categories, with sentences for what cannot be used."""

from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import compute

from rayfl.data.datasets import Field, Source
from rayfl.data.sources.csv_files import GAPS, Dialect, Separator
from rayfl.data.sources.splits import FileSplit, chosen, split_of
from rayfl.data.sources.table_files import FILE, class_names, form, read_tables, require_class_names, row_in_words
from rayfl.errors import RayflError, did_you_mean, log_once
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded
from rayfl.settings import shown

Missing = Literal["refuse", "drop", "mean", "category"]
EXACT = 2**53
"""Up to this size all whole numbers are float64 numbers."""


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type has numbers or truth values."""
    is_plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return is_plain or pa.types.is_decimal(kind)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


class TableColumns:
    """A table, and its path for the sentences of errors. missing: what is done about gaps, see `TableSource`."""

    def __init__(self, path: str, table: pa.Table, missing: Missing = "refuse") -> None:
        self.path = path
        self.table = table
        self.missing: Missing = missing
        self.kinds = dict(zip(table.column_names, table.schema.types, strict=True))

    # Any: an array of pyarrow, of any type.
    def raw(self, name: str) -> Any:
        """A column as pyarrow's array, texts decoded from dictionaries, decimals as numbers.

        Raise RayflError if it is missing or there twice.
        """
        try:
            column: Any = self.table.column(name).combine_chunks()
        except KeyError as error:
            raise RayflError(f"{self.path}: {error.args[0]}: {self._advice(name)}") from None
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_decimal(column.type):
            column = column.cast(pa.float64())
        return column

    def _advice(self, name: str) -> str:
        names = self.table.column_names
        if name in names:
            return "rename one"
        if len(names) == 1:
            return f"its only column is called {names[0]!r}; if that is a whole row, give data.separator"
        headless = (
            f"; its first row is {shown(names)}: if the file has no header, give data.header the names of its columns, "
            "or 'numbered' to call them '0', '1', ..."
        )
        return did_you_mean(name, names) + (headless if any(map(_is_numeral, names)) else "")

    def has_numerals(self, name: str) -> bool:
        """Whether a column has numbers or truth values, or texts among which there are some."""
        column = self.raw(name)
        if not is_text(column.type):
            return True
        return any(
            _is_numeral(word) or word.lower() in ("true", "false")
            for word in compute.call_function("unique", [column]).to_pylist()
            if word
        )

    def gaps(self, name: str) -> np.ndarray:
        """Which rows have nothing in a column, bool [rows]: nulls and empty texts; if gaps are filled or dropped, also
        NaN, and the words that stand for gaps."""
        column = self.raw(name)
        gaps = column.is_null(nan_is_null=self.missing != "refuse").to_numpy(zero_copy_only=False)
        if is_text(column.type):
            # A gap in a CSV column of texts is an empty text.
            words = pa.array(GAPS if self.missing != "refuse" else [""], column.type)
            gaps |= compute.call_function("is_in", [column], compute.SetLookupOptions(value_set=words)).to_numpy(
                zero_copy_only=False
            )
        return gaps

    def without_gaps(self, names: Sequence[str]) -> "TableColumns":
        """The rows that have no gap in the named columns; a notice says how many are left out."""
        gaps = np.zeros(self.table.num_rows, dtype=bool)
        for name in names:
            gaps |= self.gaps(name)
        if not gaps.any():
            return self
        log_once(
            WARNING,
            f"{self.path}: {np.count_nonzero(gaps)} of {len(gaps)} rows have gaps in columns that are used, and are "
            "left out, by data.missing='drop'",
        )
        return TableColumns(self.path, self.table.filter(pa.array(~gaps)), self.missing)

    def refuse_gaps(self, name: str, cure: str = "or set data.missing='drop'") -> None:
        """Raise RayflError for a gap in a column; `cure`: the last of the ways to go on."""
        gaps = self.gaps(name)
        if gaps.any():
            raise RayflError(
                f"{self.path} has nothing in column {name!r} of {row_in_words(self.table, int(gaps.argmax()))}; fill "
                f"it, drop it, {cure}"
            )

    def column(self, name: str, of_lists: str = "") -> np.ndarray:
        """The numbers or texts of a column, whose bytes are texts. Raise RayflError, which ends with `of_lists` for
        lists, if one is missing, or if the column has neither."""
        self.refuse_gaps(name)
        if is_list(self.raw(name).type) and of_lists:
            raise RayflError(f"{self._misfit(name)}; {of_lists}")
        return self._values(name, self.raw(name))

    def _misfit(self, name: str) -> str:
        return f"{self.path} has a column {name!r} of type {self.kinds[name]}, where one number or text a row is needed"

    # Any: an array of pyarrow.
    def _values(self, name: str, column: Any) -> np.ndarray:
        if pa.types.is_nested(column.type):
            raise RayflError(self._misfit(name))
        values = column.to_numpy(zero_copy_only=False)
        return self.texts(name, values) if isinstance(next(iter(values.tolist()), None), bytes) else values

    def texts(self, name: str, values: np.ndarray) -> np.ndarray:
        """Bytes as texts. Raise RayflError if they are not UTF-8."""
        texts = np.empty(len(values), object)
        for row, content in enumerate(values):
            try:
                texts[row] = content.decode()
            except UnicodeDecodeError:
                raise RayflError(
                    f"{self.path} has no UTF-8 text in column {name!r} of row {row} (counted from 0), "
                    f"{shown(content)}; give data.encoding that of the file, such as 'latin-1', or write texts"
                ) from None
        return texts

    def width(self, name: str) -> int:
        """The number of inputs of a column of numbers, or of lists of numbers of one length; 0 for any other column."""
        column = self.raw(name)
        width = 1
        while is_list(column.type):
            lengths = compute.call_function("list_value_length", [column])
            if column.null_count or len(lengths.unique()) != 1:
                return 0
            width *= lengths[0].as_py()
            column = column.flatten()
        is_whole = not column.null_count or not is_list(self.kinds[name])
        return width if is_number(column.type) and is_whole else 0

    def inputs(self, names: Sequence[str], values: Mapping[str, Sequence[object]]) -> np.ndarray:
        """The inputs, float64 [rows, inputs]: a number is one, a list one for each place, a category one for each of
        its `values`. NaN where a number is missing and gaps are filled."""
        widths = [len(values[name]) if name in values else max(1, self.width(name)) for name in names]
        memory.require(
            8 * self.table.num_rows * sum(widths), f"{self.path} with {sum(widths)} inputs", "name fewer columns"
        )
        inputs = np.empty((self.table.num_rows, sum(widths)))
        start = 0
        for name in names:
            part = self._one_hot(name, values[name]) if name in values else self.numbers(name)
            inputs[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return inputs

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers, or of lists of one length, float64 [rows, width]."""
        column = self.raw(name)
        if is_list(column.type) and (width := self.width(name)):
            return column.flatten(recursive=True).to_numpy(zero_copy_only=False).astype(np.float64).reshape(-1, width)
        if is_list(column.type):
            raise RayflError(
                f"{self.path} has a column {name!r} of type {column.type}, where inputs and targets are numbers, or "
                "lists of numbers of one length without gaps"
            )
        if self.missing not in ("mean", "category"):
            self.refuse_gaps(name, "or set data.missing to 'drop', 'mean' or 'category'")
        if pa.types.is_boolean(column.type) and column.null_count:
            column = column.cast(pa.int8())
        values = self._values(name, column)
        if values.dtype.kind not in "biuf":
            raise RayflError(
                f"{self.path} has {shown(values[0])} in column {name!r}; inputs and targets are columns of numbers, "
                "and other inputs are in data.categories"
            )
        whole = column.drop_null() if pa.types.is_integer(column.type) else pa.array([], pa.int64())
        if _collapse(whole.to_numpy(zero_copy_only=False)):
            raise RayflError(
                f"{self.path} has whole numbers above 2^53 in column {name!r}, some of which become equal as float64; "
                "leave it out of data.features, or subtract a constant"
            )
        return values.astype(np.float64)[:, None]

    def categories(self, name: str) -> list[object]:
        """The sorted values of a category; the last one is None if there are gaps that are a category of their own."""
        gaps = self.gaps(name)
        if self.missing not in ("mean", "category"):
            self.refuse_gaps(name, "or set data.missing to 'drop' or 'category'")
        values = self._values(name, self.raw(name).filter(pa.array(~gaps)))
        return [*np.unique(values).tolist(), *([None] if gaps.any() else [])]

    def _one_hot(self, name: str, values: Sequence[object]) -> np.ndarray:
        gaps = self.gaps(name)
        if None not in values:
            self.refuse_gaps(name, "since no train example has a gap there")
        column = self._values(name, self.raw(name).filter(pa.array(~gaps)))
        named = [value for value in values if value is not None]
        if strange := [value for value in dict.fromkeys(column.tolist()) if value not in {*named}]:
            raise RayflError(
                f"{self.path} has {shown(min(strange, key=str))} in column {name!r}, which no train example has; leave "
                "these rows out"
            )
        one_hot = np.zeros((len(gaps), len(values)), dtype=bool)
        one_hot[~gaps, : len(named)] = column[:, None] == np.array(named, dtype=column.dtype)
        one_hot[gaps, -1] = True
        return one_hot

    def class_names(self, name: str) -> tuple[str, ...]:
        """The names that Hugging Face's datasets gives the numbers of a column; () if it gives none."""
        return class_names(self.table.schema, name)

    def label_lists(self, name: str, train: "TableColumns") -> tuple[np.ndarray, tuple[str, ...]] | None:
        """Lists of classes as 0 and 1, int64 [rows, labels], and the names of labels; None for a column of numbers.

        Lists of one length that hold floats, or only 0 and 1, are numbers. Labels are those of the `train` table.
        """
        column, of_train = self.raw(name), train.raw(name)
        if not is_list(column.type):
            return None
        flat = train.numbers(name) if _leaf(of_train.type) is not None and train.width(name) else np.empty(0)
        leaf = _leaf(of_train.type)
        if flat.size and (pa.types.is_floating(leaf) or pa.types.is_decimal(leaf) or np.isin(flat, (0, 1)).all()):
            return None
        self.refuse_gaps(name)
        entries = self._values(name, column.flatten())
        classes = np.unique(self._values(name, of_train.flatten()))
        names = self.class_names(name) or tuple(map(str, classes.tolist()))
        if len(names) > len(classes) and classes.dtype.kind in "iu":
            classes = np.arange(len(names))
        rows = np.repeat(
            np.arange(len(column)), compute.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
        )
        if len(strange := np.flatnonzero(~np.isin(entries, classes))):
            raise RayflError(
                f"{self.path} has {shown(entries[strange[0]])} in column {name!r} of row {rows[strange[0]]} (counted "
                "from 0), which no train example has; leave these rows out"
            )
        labels = np.zeros((len(column), len(classes)), np.int64)
        labels[rows, np.searchsorted(classes, entries)] = 1
        return labels, names


def _leaf(kind: pa.DataType) -> pa.DataType | None:
    """The type of the numbers in lists of any depth; None if they are no numbers, or if it is no list."""
    if not is_list(kind):
        return None
    while is_list(kind):
        kind = kind.value_type
    return kind if is_number(kind) else None


def _is_numeral(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _collapse(values: np.ndarray) -> bool:
    """Whether different whole numbers are one as float64."""
    if not len(values) or max(-int(values.min()), int(values.max())) <= EXACT:
        return False
    return len(np.unique(values)) > len(np.unique(values.astype(np.float64)))


class TableSource(Source):
    """Base of the sources that read tables: their files, and how CSV files are written."""

    path: str = Field(
        min_length=1,
        examples=["my_table.csv"],
        description="a CSV, JSON, JSON lines, Parquet or Feather file, or a folder of such files",
    )
    test_path: str | None = Field(default=None, description="a second file to test on; default: a share of the first")
    labels: str = Field(default="label", description="the column of labels")
    named_labels: bool = Field(
        default=False, description="labels are names of classes, also where they are numbers, such as -1 and 1"
    )
    owners: str | None = Field(
        default=None, description=f"the column with the owner of each example; {FILE!r}: the files of a folder"
    )
    split: str | None = Field(
        default=None, description="a column that says of each row whether it is train, validation or test"
    )
    separator: Separator | None = Field(
        default=None, description="what separates the columns of a CSV file; default: found by its first rows"
    )
    header: tuple[str, ...] | Literal["numbered"] | None = Field(
        default=None, description="names of the columns of a CSV file without a header; 'numbered': '0', '1', ..."
    )
    encoding: str = Field(default="utf-8", description="encoding of a CSV file, such as latin-1, cp1252 or utf-16")
    decimal: Literal[".", ","] | None = Field(
        default=None, description="the decimal mark of a CSV file; default: found by its first rows"
    )
    test_share: float = Field(
        default=0.2, gt=0, lt=1, description="share that is held out if there is no test split or test_path"
    )

    def unused(self) -> Mapping[str, str]:
        return {**super().unused(), **({"test_path": "beside split"} if self.split is not None else {})}

    def texts(self) -> tuple[str, ...]:
        """Columns of CSV files that are texts, even if they look like numbers."""
        return ()

    def names(self) -> tuple[str, ...]:
        """The columns whose values are names, even if they are numbers: labels, and owners."""
        return (self.labels, *([self.owners] if self.owners else []))

    def read(self, missing: Missing = "refuse") -> tuple[TableColumns, TableColumns | None]:
        """The tables of train and test. Names that are numbers in one and texts in the other are texts in both."""
        train, test = self._read(missing, self.texts())
        if test is None or form(expanded(self.path)) != "csv":
            return train, test
        known = [name for name in self.names() if name in train.kinds and name in test.kinds]
        differing = [name for name in known if is_text(train.kinds[name]) != is_text(test.kinds[name])]
        if differing := [name for name in differing if train.has_numerals(name) and test.has_numerals(name)]:
            # As they are written: 007 is no number.
            return self._read(missing, (*self.texts(), *differing))
        return train, test

    def _read(self, missing: Missing, texts: tuple[str, ...]) -> tuple[TableColumns, TableColumns | None]:
        dialect = Dialect(self.separator, self.header, self.encoding, self.decimal, texts, self.names())
        with_file = self.owners == FILE
        tables: dict[FileSplit, pa.Table] = read_tables(self.path, "data.path", dialect, with_file)
        test_path = self.path
        given = "data.split" if self.split is not None else "data.test_path"
        if "test" in tables and (self.split is not None or self.test_path is not None):
            raise RayflError(f"{self.path} has a test split of its own; remove {given}, or name the train split alone")
        if self.split is not None:
            tables = self._divided(tables["train"], self.split)
        elif self.test_path is not None:
            test_path = self.test_path
            tables["test"] = read_tables(test_path, "data.test_path", dialect, with_file)["train"]
        if empty := [split for split, table in tables.items() if not table.num_rows]:
            raise RayflError(f"{test_path if empty == ['test'] else self.path} has no rows to {empty[0]} with")
        train = TableColumns(self.path, tables["train"], missing)
        for name in train.kinds if "test" in tables else ():
            # Single labels of test are numbered as those of train (table_labels.py).
            if name != self.labels or self.named_labels:
                require_class_names(
                    f"the test split of {test_path}", tables["test"].schema, "train", train.table.schema, name
                )
        return train, TableColumns(test_path, tables["test"], missing) if "test" in tables else None

    def _divided(self, table: pa.Table, name: str) -> dict[FileSplit, pa.Table]:
        """The splits that a column names. Raise RayflError if one of its values names none."""
        named = TableColumns(self.path, table).column(name)
        rows: list[tuple[FileSplit, Path]] = []
        for value in dict.fromkeys(named.tolist()):
            if (split := split_of(str(value))) is None:
                raise RayflError(
                    f"{self.path} has {shown(value)} in column {name!r}, data.split, whose values must be train, "
                    "validation or test"
                )
            rows.append((split, Path(value)))
        splits = chosen(Path(self.path), rows)
        return {split: table.filter(pa.array(named == path.name)) for split, path in splits.items()}

    def owners_of(self, columns: TableColumns) -> np.ndarray | None:
        """The owner of each example, if the source has them."""
        return None if self.owners is None else columns.column(self.owners)
