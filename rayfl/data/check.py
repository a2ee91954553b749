"""Checks data when they are loaded, so that clients get no invalid numbers.

Large arrays are checked piece by piece: a memory-mapped file is read once and never held in memory.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from rayfl.data.datasets import Dataset, Samples
from rayfl.errors import RayflError

_CHUNK_BYTES = 16 << 20
MOST_CLASSES = 1_000_000
"""The largest number of classes: labels count from 0 without gaps, and a model has an output for each class."""


def checked_dataset(dataset: Dataset) -> Dataset:
    """The dataset, if models can train on it. RayflError, with its files and the first bad row, if it is empty, has
    unequal lengths or shapes, numbers that are not finite, or labels or tokens out of range."""
    for split, samples in (("train", dataset.train), ("test", dataset.test)):
        place = samples.place or f"dataset {dataset.name!r}"
        check_lengths(place, split, samples)
        check_finite(place, split, samples.inputs)
        _check_labels(place, split, samples.labels, dataset.num_classes)
        if dataset.kind == "text":
            _check_tokens(place, split, samples.inputs, dataset.vocabulary)
    check_shapes(dataset.train.place or dataset.name, dataset.train.inputs, dataset.test.inputs)
    return dataset


def check_lengths(place: str, split: str, samples: Samples) -> None:
    """Raise RayflError unless there are nonempty inputs, each with a label and, if owners are given, an owner."""
    shape = samples.inputs.shape
    if len(shape) < 2 or 0 in shape:
        raise RayflError(
            f"{place} has {split} inputs of shape {list(shape)}; give at least one sample, [n, dim] or more"
        )
    for word, values in (("labels", samples.labels), ("owners", samples.groups)):
        if word == "labels" and values is not None and values.ndim == 2 and len(values) == shape[0]:
            cure = "; these look one-hot: give labels.argmax(1)" if _looks_one_hot(values[:1000]) else ""
            raise RayflError(
                f"{place} has {split} labels of shape {list(values.shape)}; give one class number for each of the "
                f"{shape[0]} inputs{cure}"
            )
        if values is not None and values.shape != shape[:1]:
            raise RayflError(
                f"{place} has {shape[0]} {split} inputs and {word} of shape {list(values.shape)}; give one of them for "
                "each input"
            )


def _looks_one_hot(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "biuf" and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())


def check_shapes(place: str, train: np.ndarray, test: np.ndarray) -> None:
    """Raise RayflError unless the inputs of both splits have one shape."""
    if train.shape[1:] != test.shape[1:]:
        raise RayflError(
            f"{place} has train inputs of shape {list(train.shape[1:])} and test inputs of shape "
            f"{list(test.shape[1:])}; give both one shape"
        )


def check_finite(place: str, split: str, inputs: np.ndarray) -> None:
    """Raise RayflError for an input that is NaN or infinite."""
    if inputs.dtype.kind != "f":
        return
    row = first_row(inputs, lambda part: ~np.isfinite(part))
    if row is not None:
        raise RayflError(f"{place} has a {split} input that is NaN or infinite ({_counted(row)}); correct it")


def whole_labels(place: str, split: str, labels: np.ndarray, num_classes: int = MOST_CLASSES) -> np.ndarray:
    """Labels of any numeric type as int64. Raise RayflError if one is not a whole number in [0, num_classes); nothing
    is rounded."""
    if labels.dtype.kind not in "biuf":
        _refuse(place, split, 0, labels, num_classes)

    def is_wrong(part: np.ndarray) -> np.ndarray:
        return ~(np.isfinite(part) & (part == np.floor(part)) & (part >= 0) & (part < num_classes))

    row = first_row(labels, is_wrong)
    if row is not None:
        _refuse(place, split, row, labels, num_classes)
    return labels.astype(np.int64)


def first_row(values: np.ndarray, is_wrong: Callable[[np.ndarray], np.ndarray]) -> int | None:
    """The first row with an entry for which `is_wrong`, which gets the array in pieces; None if no row has one."""
    rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        wrong = is_wrong(values[start : start + rows])
        if wrong.any():
            return start + int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])
    return None


def _check_labels(place: str, split: str, labels: np.ndarray, num_classes: int) -> None:
    if labels.dtype.kind not in "iu":
        raise RayflError(f"{place} has {split} labels of type {labels.dtype}; classes are whole numbers from 0")
    row = first_row(labels, lambda part: (part < 0) | (part >= num_classes))
    if row is not None:
        _refuse(place, split, row, labels, num_classes)


def _check_tokens(place: str, split: str, tokens: np.ndarray, vocabulary: int | None) -> None:
    most = np.inf if vocabulary is None else vocabulary
    row = first_row(tokens, lambda part: (part < 0) | (part >= most))
    if row is not None:
        given = tokens[row][(tokens[row] < 0) | (tokens[row] >= most)].flat[0]
        upper = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise RayflError(f"{place} has the token {given} in a {split} input ({_counted(row)}); tokens are 0{upper}")


def _refuse(place: str, split: str, row: int, labels: np.ndarray, num_classes: int) -> NoReturn:
    known = num_classes < MOST_CLASSES
    allowed = f"whole numbers from 0 to {num_classes - 1}" if known else "whole numbers from 0, or the names of classes"
    which = f"{split} label".strip()
    raise RayflError(f"{place} has the {which} {labels[row]} ({_counted(row)}); labels are {allowed}")


def _counted(row: int) -> str:
    return f"row {row}, counted from 0"
