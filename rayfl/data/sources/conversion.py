"""Checks a user's own inputs, labels and owners, and makes a dataset of them."""

from functools import cache
from typing import Literal

import numpy as np

from rayfl.data.check import check_finite, check_lengths, check_shapes, check_targets, first_row, whole_labels
from rayfl.data.datasets import Dataset, Samples, moments, shown
from rayfl.errors import RayflError, log

Kind = Literal["auto", "image", "vector", "text"]
PAD = 0
"""The token that fills short sequences."""


def dataset(
    name: str, place: str, train: Samples, test: Samples | None, test_share: float, kind: Kind = "auto"
) -> Dataset:
    """The dataset of a user's samples, whose labels and groups may be numbers or names.

    Without `test` a share of the samples, drawn with a fixed seed, is held out. `place`: the file's name in error
    messages. Raise RayflError for unequal lengths, NaN, and wrong labels.
    """
    for rows, split in ((train, "train"), (test, "test")):
        if rows is not None:
            _check(rows.place or place, split, rows)
    if test is None:
        train, test = _held_out(place, train, test_share)
    check_shapes(place, train, test)
    if (train.groups is None) != (test.groups is None):
        raise RayflError(f"{place} names the owners of one split only; name those of both, or of none")
    owners = (None, None) if train.groups is None or test.groups is None else _numbered(train.groups, test.groups)
    kind = _kind(train.inputs) if kind == "auto" else kind
    if train.labels.ndim == 1:
        train_labels, test_labels, num_classes = _numbered_labels(place, train.labels, test.labels)
    else:
        train_labels, test_labels = _targets(train.labels), _targets(test.labels)
        num_classes = train.labels.shape[-1]
        if kind == "text" and train.labels.shape == train.inputs.shape:
            num_classes = 1 + max(int(tokens.max()) for one in (train, test) for tokens in (one.inputs, one.labels))
    train_inputs, test_inputs = (_inputs(rows.place or place, rows.inputs, kind) for rows in (train, test))
    mean, std = moments(train_inputs) if kind == "image" else ((), ())
    return Dataset(
        name=name,
        train=Samples(train_inputs, train_labels, owners[0], train.place or place),
        test=Samples(test_inputs, test_labels, owners[1], test.place or place),
        num_classes=num_classes,
        kind=kind,
        mean=mean,
        std=std,
    )


def _check(place: str, split: str, rows: Samples) -> None:
    check_lengths(place, split, rows)
    if rows.inputs.dtype.kind not in "biuf":
        raise RayflError(f"{place} has {split} inputs of type {rows.inputs.dtype}; give numbers")
    check_finite(place, split, rows.inputs)
    if rows.labels.ndim > 1:
        check_targets(place, split, rows.labels)
    elif not _are_names(rows.labels):
        whole_labels(place, split, rows.labels)
    for word, values in (("label", rows.labels), ("owner", rows.groups)):
        row = None if values is None else first_row(values, _is_gap)
        if row is not None:
            raise RayflError(f"{place} has no {word} for the {split} input of row {row} (counted from 0); give it one")


def _is_gap(values: np.ndarray) -> np.ndarray:
    """Where there is NaN, None or an empty text."""
    if values.dtype.kind in "UO":
        return np.array([value is None or value != value or value == "" for value in values.tolist()])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def _held_out(place: str, rows: Samples, share: float) -> tuple[Samples, Samples]:
    """Train and test samples in their order. The draw is the same for every experiment."""
    count = round(share * len(rows.inputs))
    if not 0 < count < len(rows.inputs):
        raise RayflError(
            f"test_share={share:g} of the {len(rows.inputs)} samples of {place} leaves {len(rows.inputs) - count} to "
            f"train and {count} to test; give another share, or test samples of their own"
        )
    chosen = np.zeros(len(rows.inputs), dtype=bool)
    chosen[np.random.default_rng(0).permutation(len(chosen))[:count]] = True
    train, test = (
        Samples(rows.inputs[part], rows.labels[part], None if rows.groups is None else rows.groups[part], rows.place)
        for part in (~chosen, chosen)
    )
    return train, test


def _are_names(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "UO"


@cache
def _notice(place: str, least: int, num_classes: int) -> None:
    """Warn once per file, since every run of a sweep reads it."""
    log.warning(
        "%s has no sample of class 0: its smallest label is %d, and models get %d outputs; if that is not intended, "
        "subtract the smallest label from all",
        place,
        least,
        num_classes,
    )


def _numbered_labels(place: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Labels as int64 from 0, and the number of classes: names are numbered in their order, numbers stay."""
    if _are_names(train) != _are_names(test):
        kinds = ("names", "numbers") if _are_names(train) else ("numbers", "names")
        raise RayflError(
            f"{place} has {kinds[0]} as train labels and {kinds[1]} as test labels ({shown(train.tolist()[0])} and "
            f"{shown(test.tolist()[0])}); give both as names, or both as numbers"
        )
    if _are_names(train):
        train, test = _numbered(train.astype(str), test.astype(str))
    train, test = train.astype(np.int64), test.astype(np.int64)
    least, num_classes = int(min(train.min(), test.min())), int(max(train.max(), test.max())) + 1
    if least > 0:
        _notice(place, least, num_classes)
    return train, test, num_classes


def _targets(labels: np.ndarray) -> np.ndarray:
    """Targets that are not classes: float32 for numbers, int64 for whole numbers."""
    # Numbers too large for float32 become infinite, and are refused later with their row.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(labels, np.float32 if labels.dtype.kind == "f" else np.int64)


def _numbered(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the sorted values of both splits, and return the numbers for each split, int64."""
    _, places = np.unique(np.concatenate([train, test]), return_inverse=True)
    return places[: len(train)].astype(np.int64), places[len(train) :].astype(np.int64)


def _kind(inputs: np.ndarray) -> Literal["image", "vector", "text"]:
    """uint8 with three or four axes are images, other whole numbers with two axes are tokens; all else is vectors."""
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return "image"
    return "text" if inputs.dtype.kind in "iu" and inputs.ndim == 2 else "vector"


def _inputs(place: str, inputs: np.ndarray, kind: Kind) -> np.ndarray:
    """Inputs as a `Dataset` has them: images uint8 [n, channels, height, width], tokens int64, numbers float32."""
    if kind == "text":
        if inputs.dtype.kind not in "iu" or inputs.ndim != 2 or (inputs < 0).any():
            raise RayflError(
                f"{place} is not text: tokens are whole numbers from 0, [n, length]; for numbers set data.kind='vector'"
            )
        return inputs.astype(np.int64)
    if kind == "vector":
        # Numbers too large for float32 become infinite, and are refused later with their row.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(inputs, dtype=np.float32)
    if inputs.dtype != np.uint8 or inputs.ndim not in (3, 4):
        raise RayflError(
            f"{place} holds no images but {inputs.dtype} of shape {list(inputs.shape[1:])}; give uint8 "
            "[n, channels, height, width], or kind='vector'"
        )
    if inputs.ndim == 3:
        return np.ascontiguousarray(inputs[:, None])
    if inputs.shape[1] not in (1, 3) and inputs.shape[3] in (1, 3):
        inputs = inputs.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(inputs)


def next_tokens(tokens: np.ndarray) -> np.ndarray:
    """The token that follows each of `tokens` [n, length], int64 of that shape; -1 at the end and before padding, 0."""
    following = np.full(tokens.shape, -1, np.int64)
    following[:, :-1] = np.where(tokens[:, 1:] == PAD, -1, tokens[:, 1:])
    return following
