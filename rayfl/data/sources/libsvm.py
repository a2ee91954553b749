"""Files of LIBSVM's: a label, and the places and values of the inputs that are not 0, on each line."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.csv_files import unpacked
from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, read_bytes, reading


class SparseRows(NamedTuple):
    """The rows of a file. labels: float64 [rows]; the value of each entry that is not 0, with its row and column."""

    labels: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray


class LibSVM(Source):
    """A file in the format of LIBSVM, such as a9a, w8a or mushrooms: LABEL PLACE:VALUE PLACE:VALUE ..., places from 1.

    Files that bzip2 or gzip has packed are unpacked. Whole labels are classes in their order, so that -1 is class 0 and
    1 is class 1; other labels are numbers to predict. Inputs are not scaled.
    """

    name = "libsvm"
    path: str = Field(min_length=1, examples=["a9a"], description="a file of lines LABEL PLACE:VALUE ..., also packed")
    test_path: str | None = Field(default=None, description="a second file to test on; default: a share of the first")
    num_features: int | None = Field(
        default=None, ge=1, description="number of inputs; default: the largest place in both files"
    )
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test_path")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a line is not of this format, or has a place beyond num_features."""
        paths = [self.path, *([] if self.test_path is None else [self.test_path])]
        files = [_read(path) for path in paths]
        largest = max(1, *(int(file.columns.max(initial=-1)) + 1 for file in files))
        width = self.num_features or largest
        if largest > width:
            raise RayflError(f"data.num_features={width}, but {self.path} has the place {largest}; raise it")
        labels = np.concatenate([file.labels for file in files])
        is_class = bool((labels == np.round(labels)).all())
        classes = np.unique(labels) if is_class else np.empty(0)
        train, *test = (_dense(path, file, width, classes) for path, file in zip(paths, files, strict=True))
        names = [f"{label:g}" for label in classes]
        return dataset(self.name, self.path, train, test[0] if test else None, self.test_share, "vector", classes=names)


def _read(path: str) -> SparseRows:
    """The rows of a file. Raise RayflError if it cannot be read, or names the first line that is wrong."""
    file = expanded(path)
    with reading(file, "give a file of lines LABEL PLACE:VALUE PLACE:VALUE ..."):
        content = unpacked(file)
        lines = (read_bytes(file) if content is None else content).decode().splitlines()
        fields = [fields for line in lines if (fields := line.partition("#")[0].split())]
        if not fields:
            raise ValueError("it has no lines")
        entries: list[tuple[int, int, float]] = []
        labels = list[float]()
        for row, (label, *pairs) in enumerate(fields):
            try:
                labels.append(float(label))
                entries += [(row, int(place), float(value)) for place, _, value in _split(pairs)]
            except ValueError:
                start = " ".join(fields[row])[:60]
                raise ValueError(f"row {row}, counted from 0, is not LABEL PLACE:VALUE ...: {start!r}") from None
        if wrong := [row for row, place, _ in entries if place < 1][:1]:
            raise ValueError(f"row {wrong[0]} has a place below 1, and places count from 1")
        if not all(map(np.isfinite, labels)):
            raise ValueError("it has a label that is NaN or infinite")
    rows, places, values = zip(*entries, strict=True) if entries else ((), (), ())
    return SparseRows(np.array(labels), np.array(rows, int), np.array(places, int) - 1, np.array(values, float))


def _split(pairs: Sequence[str]) -> list[tuple[str, str, str]]:
    """The place and the value of each entry; groups of ranking data (qid) do not count."""
    return [pair.partition(":") for pair in pairs if not pair.startswith("qid:")]


def _dense(path: str, file: SparseRows, width: int, classes: np.ndarray) -> Examples:
    memory.require(4 * len(file.labels) * width, f"{path} with {width} inputs", "use a part of it")
    inputs = np.zeros((len(file.labels), width), np.float32)
    inputs[file.rows, file.columns] = file.values
    labels = np.searchsorted(classes, file.labels) if len(classes) else file.labels[:, None]
    return Examples(inputs, labels, place=path)
