"""Checks a user's own inputs, labels and owners, and makes a dataset of them."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Literal

import numpy as np

from rayfl.data.datasets import Dataset, Examples, shown
from rayfl.data.loading import check_finite, check_lengths, check_shapes, check_targets, first_row, whole_labels
from rayfl.data.sources.moments import moments
from rayfl.errors import RayflError, did_you_mean, log_once

Fit = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Makes numbers of the inputs of train and test, by those of train: it fills gaps, or numbers words."""
InputKind = Literal["auto", "image", "vector", "text"]
PAD = 0
"""The token that fills short sequences."""
SPARSE = 10
"""Labels up to this number of times the classes that occur are refused."""
COARSE = 1024
"""A notice names an input whose values lie within this number of neighbouring float32 numbers."""


def dataset(
    name: str,
    place: str,
    train: Examples,
    test: Examples | None,
    test_share: float,
    kind: InputKind = "auto",
    *,
    classes: Sequence[str] = (),
    scaled: np.ndarray | None = None,
    fit: Fit | None = None,
    owner_names: Sequence[str] = (),
) -> Dataset:
    """The dataset of a user's examples, whose labels and groups may be numbers or names.

    Without `test` a share of the examples, drawn with a fixed seed, is held out. `place`: the file's name in error
    messages. `classes`: the names of numbered classes. `scaled`: bool [inputs], the columns of float64 inputs that are
    standardised, in place and before they are rounded to float32. `fit`: makes numbers of the inputs of train and
    test, by those of train. `owner_names`: those of owners that are numbered. Raise RayflError for unequal lengths,
    NaN, and wrong labels, and for a class of `test` that `train` has not.
    """
    train, test = _with_texts(place, train), None if test is None else _with_texts(place, test)
    for rows, split in ((train, "train"), (test, "test")):
        if rows is not None:
            _check(rows.place or place, split, rows, fit is None)
    is_given = test is not None
    if test is None:
        train, test = held_out(place, train, test_share)
    check_shapes(place, train, test)
    if fit is not None:
        inputs = fit(train.inputs, test.inputs)
        train, test = replace(train, inputs=inputs[0]), replace(test, inputs=inputs[1])
    if (train.groups is None) != (test.groups is None):
        raise RayflError(f"{place} names the owners of one split only; name those of both, or of none")
    owners: tuple[np.ndarray | None, np.ndarray | None] = None, None
    named = list[str]()
    if train.groups is not None and test.groups is not None:
        train_owners, test_owners, values = _numbered(place, "owners", train.groups, test.groups)
        owners = train_owners, test_owners
        named = [owner_names[int(value)] if owner_names else str(value) for value in values]
    kind = _kind(train.inputs) if kind == "auto" else kind
    if train.labels.ndim == 1:
        train_labels, test_labels, names = _numbered_labels(place, train.labels, test.labels)
        num_classes, names = _classes(place, train_labels, test_labels, tuple(classes) or names)
        _note_alike(place, names)
        if is_given:
            _require_trained(test.place or place, train_labels, test_labels, names)
    else:
        train_labels, test_labels = _targets(train.labels), _targets(test.labels)
        names = tuple(classes)
        num_classes = train.labels.shape[-1]
        if kind == "text" and train.labels.shape == train.inputs.shape:
            num_classes = 1 + max(
                int(tokens.max()) for examples in (train, test) for tokens in (examples.inputs, examples.labels)
            )
    mean, std = ((), ()) if scaled is None else _standardise(train.inputs, test.inputs, scaled)
    train_inputs, test_inputs = (_inputs(rows.place or place, rows.inputs, kind) for rows in (train, test))
    if kind == "image":
        mean, std = moments(train_inputs)
    return Dataset(
        name=name,
        train=Examples(train_inputs, train_labels, owners[0], train.place or place),
        test=Examples(test_inputs, test_labels, owners[1], test.place or place),
        num_classes=num_classes,
        kind=kind,
        mean=mean,
        std=std,
        classes=names,
        owners=named,
    )


def _with_texts(place: str, rows: Examples) -> Examples:
    """The examples with texts in place of labels and owners that are bytes. Raise RayflError if they are not UTF-8."""
    labels, owners = (
        None if values is None else as_texts(rows.place or place, values) for values in (rows.labels, rows.groups)
    )
    return replace(rows, labels=labels, groups=owners)


def as_texts(place: str, values: np.ndarray) -> np.ndarray:
    """The values with texts in place of bytes. Raise RayflError, which begins with `place`, for what is not UTF-8."""
    if values.dtype.kind not in "SO":
        return values
    texts = np.empty(values.shape, object)
    for place_in, value in np.ndenumerate(values):
        try:
            texts[place_in] = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise RayflError(
                f"{place} has bytes that are no UTF-8 text, {shown(value)} (row {place_in[0]}, counted from 0); "
                "give texts"
            ) from None
    return texts


def _check(place: str, split: str, rows: Examples, are_numbers: bool) -> None:
    check_lengths(place, split, rows)
    if are_numbers and rows.inputs.dtype.kind not in "biuf":
        raise RayflError(f"{place} has {split} inputs of type {rows.inputs.dtype}; give numbers")
    if are_numbers:
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
    """Where there is NaN, None, pandas' NA or an empty text."""
    if values.dtype.kind in "UO":
        # Few data need it, and it takes half a second to load.
        from pandas import isna

        return isna(values) | np.array([isinstance(value, str) and value == "" for value in values.tolist()])
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def held_out(place: str, rows: Examples, share: float) -> tuple[Examples, Examples]:
    """Train and test examples in their order. The draw is the same for every experiment."""
    count = round(share * len(rows.inputs))
    if not 0 < count < len(rows.inputs):
        raise RayflError(
            f"test_share={share:g} of the {len(rows.inputs)} examples of {place} leaves {len(rows.inputs) - count} to "
            f"train and {count} to test; give another share, or test examples of their own"
        )
    chosen = np.zeros(len(rows.inputs), dtype=bool)
    chosen[np.random.default_rng(0).permutation(len(chosen))[:count]] = True
    train, test = (
        Examples(rows.inputs[part], rows.labels[part], None if rows.groups is None else rows.groups[part], rows.place)
        for part in (~chosen, chosen)
    )
    return train, test


def _are_names(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "UO"


def _numbered_labels(place: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Labels as int64 from 0, and the names of classes: names are numbered in their order, numbers stay."""
    if _are_names(train) or _are_names(test):
        train, test, names = _numbered(place, "labels", train, test)
        return train, test, tuple(map(str, names.tolist()))
    return train.astype(np.int64), test.astype(np.int64), ()


def _classes(place: str, train: np.ndarray, test: np.ndarray, names: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """The number of classes, the largest label + 1, and their names.

    A notice names classes without examples. Raise RayflError for `SPARSE` times as many classes as occur.
    """
    occurring = np.union1d(train, test)
    num_classes = int(occurring[-1]) + 1
    names = names[:num_classes]
    of_labels = f"its labels are {occurring[0]} to {occurring[-1]}, and models get {num_classes} outputs"
    if num_classes > SPARSE * len(occurring):
        raise RayflError(
            f"{place} has examples of {len(occurring)} classes: {of_labels}; number the classes from 0 without gaps, "
            "as numpy.unique(labels, return_inverse=True) does, or give their names as labels (of a table: "
            "data.named_labels=true)"
        )
    if len(missing := np.setdiff1d(np.arange(num_classes), occurring)):
        first = ", ".join(names[label] if names else str(label) for label in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        cure = "if that is not intended, number the classes from 0 without gaps (of a table: data.named_labels=true)"
        log_once(WARNING, f"{place} has no example of class {first}{more}: {of_labels}; {cure}")
    return num_classes, names


def _note_alike(place: str, names: Sequence[str]) -> None:
    """Log a notice for two names of classes that differ in capitals, blanks or marks without a width only."""
    seen: dict[str, str] = {}
    for name in names:
        visible = (mark for mark in unicodedata.normalize("NFC", name) if unicodedata.category(mark) != "Cf")
        first = seen.setdefault(" ".join("".join(visible).lower().split()), name)
        if first != name:
            log_once(WARNING, f"{place} has the classes {first!r} and {name!r}; if they are one, write both alike")


def _require_trained(place: str, train: np.ndarray, test: np.ndarray, names: tuple[str, ...]) -> None:
    """Raise RayflError for a test label that no train example has."""
    trained = np.unique(train)
    if len(strange := np.setdiff1d(test, trained)):
        row = int(np.flatnonzero(test == strange[0])[0])
        label = str(strange[0])
        cure = "both splits must number classes alike"
        if names:
            label = shown(names[strange[0]])
            cure = did_you_mean(names[strange[0]], [names[trained_class] for trained_class in trained])
        raise RayflError(
            f"{place} has the test label {label} (row {row}, counted from 0), which no train example has: "
            f"correct it, or leave these rows out; {cure}"
        )


def _standardise(
    train: np.ndarray, test: np.ndarray, scaled: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Shift and scale the `scaled` columns of float64 inputs in place, by the mean and the deviation of train, which
    are returned; 0 and 1 for all others. Columns with one value, and those too large for a deviation, are not scaled.
    """
    low, high = train.min(axis=0), train.max(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        # The mean of numbers that differ by less than their float32 neighbours is too inexact for their differences.
        origin = np.where(high - low < 2**-24 * np.maximum(np.abs(low), np.abs(high)), low, 0.0)
        for inputs in (train, test):
            inputs -= origin
        mean, deviation = train.mean(axis=0), train.std(axis=0)
    shifted = scaled & np.isfinite(deviation)
    mean[~shifted] = -origin[~shifted]
    deviation[~shifted | (low == high)] = 1.0
    for inputs in (train, test):
        inputs -= mean
        inputs /= deviation
    return tuple((mean + origin).tolist()), tuple(deviation.tolist())


def _targets(labels: np.ndarray) -> np.ndarray:
    """Targets that are not classes: float32 for numbers, int64 for whole numbers."""
    # Numbers too large for float32 become infinite, and are refused later with their row.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(labels, np.float32 if labels.dtype.kind == "f" else np.int64)


def _numbered(place: str, what: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the sorted values of both splits; returns the numbers for each split, int64, and the values.

    Raise RayflError for names in one split and numbers in the other. `what`: "labels" or "owners".
    """
    has_texts = [_has_texts(values) for values in (train, test)]
    if has_texts[0] != has_texts[1]:
        kinds = ("names", "numbers") if has_texts[0] else ("numbers", "names")
        raise RayflError(
            f"{place} has {kinds[0]} as train {what} and {kinds[1]} as test {what} ({shown(train.tolist()[0])} and "
            f"{shown(test.tolist()[0])}); give both as names, or both as numbers"
        )
    if has_texts[0] or what == "labels":
        train, test = train.astype(str), test.astype(str)
    values, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    return numbers[: len(train)].astype(np.int64), numbers[len(train) :].astype(np.int64), values


def _has_texts(values: np.ndarray) -> bool:
    return values.dtype.kind == "U" or (values.dtype.kind == "O" and any(isinstance(value, str) for value in values))


def _kind(inputs: np.ndarray) -> Literal["image", "vector", "text"]:
    """uint8 with three or four axes are images, other whole numbers with two axes are tokens; all else is vectors."""
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return "image"
    return "text" if inputs.dtype.kind in "iu" and inputs.ndim == 2 else "vector"


def _inputs(place: str, inputs: np.ndarray, kind: InputKind) -> np.ndarray:
    """Inputs as a `Dataset` has them: images uint8 [n, channels, height, width], tokens int64, numbers float32."""
    if kind == "text":
        if inputs.dtype.kind not in "iu" or inputs.ndim != 2 or (inputs < 0).any():
            raise RayflError(
                f"{place} is not text: tokens are whole numbers from 0, [n, length]; for numbers set data.kind='vector'"
            )
        return inputs.astype(np.int64)
    if kind == "vector":
        _check_resolution(place, inputs)
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
    return np.ascontiguousarray(inputs.transpose(0, 3, 1, 2) if _channels_last(place, inputs.shape[1:]) else inputs)


def _channels_last(place: str, shape: Sequence[int]) -> bool:
    """Whether images of three axes have their channels in the last one.

    The channels are the axis of 1 or 3; else the one beside two equal sides, but in the last axis only if they are
    fewer than the pixels of a side; else the first axis if it is the shortest, or the last one if it is less than half
    as long as the others. Raise RayflError for other shapes.
    """
    first, middle, last = shape
    if first in (1, 3) or last in (1, 3):
        return first not in (1, 3)
    if middle == last or first < min(middle, last):
        return False
    if last < (first if first == middle else min(first, middle) / 2):
        return True
    raise RayflError(
        f"{place} has images of shape {[first, middle, last]}, of which neither the first axis is clearly that of the "
        "channels nor the last; with data.kind='vector' models get the numbers as they are"
    )


def _check_resolution(place: str, inputs: np.ndarray) -> None:
    """Log a notice for inputs whose values float32 hardly tells apart: large numbers with small differences."""
    if inputs.dtype.kind not in "iuf" or inputs.dtype.itemsize < 4 or inputs.dtype == np.float32:
        return
    low, high = (extreme.astype(np.float64) for extreme in (inputs.min(axis=0), inputs.max(axis=0)))
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.spacing(np.maximum(np.abs(low), np.abs(high)).astype(np.float32))
        coarse = np.argwhere((high > low) & (high - low < COARSE * step))
    if len(coarse):
        position = ", ".join(map(str, coarse[0]))
        log_once(
            WARNING,
            f"{place} has inputs from {low[tuple(coarse[0])]:.17g} to {high[tuple(coarse[0])]:.17g} (input {position}, "
            f"counted from 0), which become equal as float32, or nearly so: standardise them, or subtract a constant",
        )


def next_tokens(tokens: np.ndarray) -> np.ndarray:
    """The token that follows each of `tokens` [n, length], int64 of that shape; -1 at the end and before padding, 0."""
    following = np.full(tokens.shape, -1, np.int64)
    following[:, :-1] = np.where(tokens[:, 1:] == PAD, -1, tokens[:, 1:])
    return following
