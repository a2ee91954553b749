"""Loads data sets, keeps those in use, and checks them, so that clients get no invalid numbers.

Large arrays are checked piece by piece: a memory-mapped file is read once and never held in memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from weakref import WeakValueDictionary

import numpy as np

from rayfl.data.datasets import Dataset, Examples, RayflError, Source
from rayfl.data.file_digest import source_digests
from rayfl.data.sources.several_inputs import InputLayout, are_several
from rayfl.errors import log_once
from rayfl.settings import shown

_CHUNK_BYTES = 16 << 20
MOST_CLASSES = 1_000_000
"""The largest number of classes: labels count from 0 without gaps, and a model has an output for each class."""


_in_use: WeakValueDictionary[str, Dataset] = WeakValueDictionary()
"""The datasets of files that this process still uses, by their settings and the digests of the files."""


def read_dataset(source: Source) -> Dataset:
    """Load and check the dataset of a source, or return the one that this process already uses of the same files.

    Raise RayflError as `checked_dataset` does.
    """
    if not (digests := source_digests(source)):
        return checked_dataset(source.load())
    settings = repr((type(source), source.to_table(), digests))
    if (dataset := _in_use.get(settings)) is None:
        dataset = _in_use[settings] = checked_dataset(source.load())
    return dataset


@contextmanager
def keeping_datasets(sources: Iterable[Source]) -> Iterator[None]:
    """Context manager: `read_dataset` loads the datasets of these sources once, now, and returns them in the block.

    Raise RayflError as it does.
    """
    kept = [read_dataset(source) for source in sources]
    yield
    kept.clear()


def checked_dataset(dataset: Dataset) -> Dataset:
    """The dataset, if models can train on it. RayflError, with its files and the first bad row, if it is empty, has
    unequal lengths or shapes, numbers that are not finite, or labels or tokens out of range. A notice names
    classes that only the test has."""
    dataset = _with_rows(dataset)
    has_class = list[np.ndarray]()
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        place = examples.place or f"dataset {dataset.name!r}"
        check_lengths(place, split, examples)
        check_finite(place, split, examples.inputs)
        if dataset.has_classes:
            if examples.labels.dtype.kind not in "iu":
                raise RayflError(
                    f"{place} has {split} labels of type {examples.labels.dtype}; classes are whole numbers"
                )
            classes = whole_labels(place, split, examples.labels, dataset.num_classes).ravel()
            has_class.append(np.bincount(classes, minlength=dataset.num_classes) > 0)
        else:
            check_targets(place, split, examples.labels)
        if dataset.kind == "text":
            _check_tokens(place, split, examples.inputs, dataset.vocabulary)
    check_shapes(dataset.train.place or dataset.name, dataset.train, dataset.test)
    if untrained := np.flatnonzero(has_class[1] > has_class[0]).tolist() if has_class else ():
        log_once(
            WARNING,
            f"{dataset.name} has test examples of {shown([*map(dataset.class_name, untrained)])}, classes that "
            "no train example has",
        )
    return dataset


def _with_rows(dataset: Dataset) -> Dataset:
    """The dataset with a row of numbers in place of an example's several inputs, or targets. RayflError if they make
    no rows."""
    for arrays, described in (("labels", "targets"), ("inputs", "layout")):
        if are_several(getattr(dataset.train, arrays)):
            if arrays == "inputs" and (dataset.kind != "vector" or dataset.mean or dataset.augment):
                raise RayflError(
                    f"dataset {dataset.name!r} has several inputs, which models get as they are: give kind='vector', "
                    "and neither mean, std nor augment"
                )
            layout = InputLayout.of(getattr(dataset.train, arrays))
            splits = {
                split: replace(examples, **{arrays: layout.pack(examples.place or f"dataset {dataset.name!r}", rows)})
                for split, examples in (("train", dataset.train), ("test", dataset.test))
                for rows in [getattr(examples, arrays)]
            }
            dataset = replace(dataset, **splits, **{described: layout})
    return dataset


def check_lengths(place: str, split: str, examples: Examples) -> None:
    """Raise RayflError unless there are nonempty inputs, each with a target and, if owners are given, an owner."""
    shape = examples.inputs.shape
    if len(shape) < 2 or 0 in shape:
        raise RayflError(
            f"{place} has {split} inputs of shape {list(shape)}; give at least one example, [n, dim] or more"
        )
    for word, values in (("labels", examples.labels), ("owners", examples.groups)):
        if values is not None and (values.shape[:1] != shape[:1] or (word == "owners" and values.ndim > 1)):
            raise RayflError(
                f"{place} has {shape[0]} {split} inputs and {word} of shape {list(values.shape)}; give one of them for "
                "each input"
            )


def check_shapes(place: str, train: Examples, test: Examples) -> None:
    """Raise RayflError unless the inputs of both splits have one shape, and the targets too."""
    for word, of_train, of_test in (("inputs", train.inputs, test.inputs), ("labels", train.labels, test.labels)):
        if of_train.shape[1:] != of_test.shape[1:]:
            raise RayflError(
                f"{place} has train {word} of shape {list(of_train.shape[1:])} and test {word} of shape "
                f"{list(of_test.shape[1:])}; give both one shape"
            )


def check_finite(place: str, split: str, values: np.ndarray, word: str = "input") -> None:
    """Raise RayflError for an input, or a target, that is NaN or infinite."""
    row = first_row(values, lambda part: ~np.isfinite(part)) if values.dtype.kind == "f" else None
    if row is not None:
        raise RayflError(
            f"{place} has a {split} {word} that is NaN or infinite (row {row}, counted from 0); correct it"
        )


def check_targets(place: str, split: str, targets: np.ndarray) -> None:
    """Raise RayflError unless targets that are not classes are finite numbers."""
    if targets.dtype.kind not in "biuf" or 0 in targets.shape:
        raise RayflError(
            f"{place} has {split} labels of type {targets.dtype}, {list(targets.shape)}; give numbers [n, outputs], or "
            "one class for each input, [n]"
        )
    check_finite(place, split, targets, "label")


def whole_labels(place: str, split: str, labels: np.ndarray, num_classes: int = MOST_CLASSES) -> np.ndarray:
    """Labels of any numeric type as int64. Raise RayflError if one is not a whole number in [0, num_classes); nothing
    is rounded."""

    def is_wrong(part: np.ndarray) -> np.ndarray:
        return ~(np.isfinite(part) & (part == np.floor(part)) & (part >= 0) & (part < num_classes))

    row = first_row(labels, is_wrong) if labels.dtype.kind in "biuf" else 0
    if row is not None:
        names = "" if num_classes < MOST_CLASSES else ", or the names of classes"
        allowed = f"whole numbers from 0 to {num_classes - 1}{names}"
        cure = ", and numbers to predict have the shape [n, outputs]" if labels.dtype.kind == "f" else ""
        raise RayflError(
            f"{place} has the {f'{split} label'.strip()} {labels[row]} (row {row}, counted from 0); labels are "
            f"{allowed}{cure}"
        )
    return labels.astype(np.int64, copy=False)


def first_row(values: np.ndarray, is_wrong: Callable[[np.ndarray], np.ndarray]) -> int | None:
    """The first row with an entry for which `is_wrong`, which gets the array in pieces; None if no row has one."""
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        wrong = is_wrong(values[start : start + rows])
        if wrong.any():
            return start + int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])
    return None


def _check_tokens(place: str, split: str, tokens: np.ndarray, vocabulary: int | None) -> None:
    most = np.inf if vocabulary is None else vocabulary
    row = first_row(tokens, lambda part: (part < 0) | (part >= most))
    if row is not None:
        token = tokens[row][(tokens[row] < 0) | (tokens[row] >= most)].flat[0]
        upper = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise RayflError(
            f"{place} has the token {token} in a {split} input (row {row}, counted from 0); tokens are 0{upper}"
        )
