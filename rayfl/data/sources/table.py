"""A user's own table: a CSV or Parquet file with a column of labels."""

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.conversion import dataset
from rayfl.errors import RayflError, did_you_mean, reason
from rayfl.limits import memory
from rayfl.limits.regular_files import absent, expanded, require_regular


class Table(Source):
    """A CSV file with a header, or a Parquet file: one sample per row, with a column of labels and columns of numbers.

    Labels are whole numbers from 0 or names of classes; each owner is a natural client.
    """

    name: ClassVar[str] = "table"
    path: str = Field(min_length=1, examples=["my_table.csv"], description="a .csv or .parquet file")
    test_path: str | None = Field(default=None, description="a second file to test on; default: a share of the first")
    labels: str = Field(default="label", description="the column of labels")
    features: tuple[str, ...] = Field(default=(), description="columns of inputs; default: all others of numbers")
    owners: str | None = Field(default=None, description="the column with the owner of each sample")
    standardise: bool = Field(default=True, description="shift and scale inputs to mean 0 and deviation 1 of train")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test_path")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a file or a column is missing, or if an input is not a number."""
        table = read(self.path, "data.path")
        features = self._features(table)
        train = self._rows(table, self.path, features)
        test = (
            None
            if self.test_path is None
            else self._rows(read(self.test_path, "data.test_path"), self.test_path, features)
        )
        found = dataset(self.name, self.path, train, test, self.test_share, kind="vector")
        if self.standardise:
            inputs = found.train.inputs.astype(np.float64)
            mean, deviation = inputs.mean(axis=0), inputs.std(axis=0)
            deviation[deviation == 0] = 1.0
            for samples in (found.train, found.test):
                samples.inputs[:] = (samples.inputs - mean) / deviation
        return found

    def _features(self, table: pa.Table) -> list[str]:
        if self.features:
            return list(self.features)
        numbers = [
            field.name
            for field in table.schema
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_boolean(field.type)
        ]
        found = [name for name in numbers if name not in (self.labels, self.owners)]
        if not found:
            raise RayflError(f"{self.path} has no column of numbers beside {self.labels!r}; give data.features")
        return found

    def _rows(self, table: pa.Table, path: str, features: list[str]) -> Samples:
        inputs = np.stack([_numbers(table, path, name) for name in features], axis=1)
        owners = None if self.owners is None else _column(table, path, self.owners)
        return Samples(inputs, _column(table, path, self.labels), owners, path)


def read(path: str, key: str) -> pa.Table:
    """Read a CSV or Parquet file. Raise RayflError if it cannot be read."""
    file = expanded(path)
    if file.suffix not in (".csv", ".parquet"):
        raise RayflError(f"{key}={path!r} is not allowed; it must be a .csv or a .parquet file")
    try:
        require_regular(file)
        if file.suffix == ".csv":
            return csv.read_csv(file)
        groups = parquet.read_metadata(file)
        unpacked = sum(groups.row_group(group).total_byte_size for group in range(groups.num_row_groups))
        memory.require(unpacked, path, "give less data")
        return parquet.read_table(file)
    except FileNotFoundError:
        raise RayflError(absent(file, f"give {key} the path of a .csv or .parquet file")) from None
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        why = why.partition("\n")[0].rstrip(".")
        raise RayflError(f"{path} cannot be read ({why}); give {key} a .csv or .parquet file") from None


def _column(table: pa.Table, path: str, name: str) -> np.ndarray:
    """The numbers or texts of a column. Raise RayflError if the column is missing or lacks values."""
    if name not in table.column_names:
        raise RayflError(f"{path} has no column {name!r}: {did_you_mean(name, table.column_names)}")
    column = table[name]
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise RayflError(f"{path} has nothing in column {name!r} of row {row} (counted from 0); fill it, or drop it")
    # Any: what a dictionary or a text column holds.
    values: Any = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.to_numpy(zero_copy_only=False)


def _numbers(table: pa.Table, path: str, name: str) -> np.ndarray:
    values = _column(table, path, name)
    if values.dtype.kind not in "biuf":
        raise RayflError(f"{path} has {str(values[0])!r} in column {name!r}; inputs are columns of numbers")
    return values.astype(np.float64)
