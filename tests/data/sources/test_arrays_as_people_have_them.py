"""Arrays as people have them: tensors with gradients, pandas' columns, bytes, and archives with other names."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rayfl.choices.kinds import make
from rayfl.data.datasets import Source
from rayfl.data.sources.arrays import Arrays
from tests.refusals import refused

LABELS = np.arange(20) % 2
FRAME = pd.DataFrame({"a": np.arange(20), "b": np.arange(20) / 2})


@pytest.mark.parametrize(
    ("inputs", "labels", "classes"),
    [
        (torch.ones(20, 2, requires_grad=True), torch.tensor(LABELS), ()),
        (torch.ones(20, 2, dtype=torch.bfloat16), LABELS, ()),
        (FRAME.convert_dtypes(), pd.Series(LABELS).convert_dtypes(), ()),
        (FRAME, pd.Categorical(["u", "v"] * 10), ("u", "v")),
        (FRAME, np.array([b"cat", b"dog"] * 10), ("cat", "dog")),
        (FRAME, np.array([b"cat", "dog"] * 10, dtype=object), ("cat", "dog")),
    ],
)
def test_what_becomes_arrays(inputs: Any, labels: Any, classes: tuple[str, ...]):
    dataset = Arrays(inputs, labels, owners=np.array([b"x", b"y"] * 10)).load()
    assert dataset.train.inputs.dtype == np.float32 and tuple(dataset.classes) == classes
    assert dataset.num_classes == 2 and dataset.train.groups is not None
    np.testing.assert_array_equal(dataset.train.groups, dataset.train.labels)


@pytest.mark.parametrize(
    ("inputs", "labels", "options", "names"),
    [
        (FRAME.convert_dtypes().mask(FRAME == 3), LABELS, {}, ["no number", "row 3", "inputs"]),
        (FRAME, pd.Series(["x", pd.NA] * 10), {}, ["no label", "row 1"]),
        (FRAME, LABELS, {"owners": pd.Series(["x", pd.NA] * 10)}, ["no owner", "row 1"]),
        (FRAME, np.array([b"x", b"\xff"] * 10), {}, ["UTF-8", "row 1"]),
        (FRAME.assign(c="x"), LABELS, {}, ["inputs of type", "give numbers"]),
        ([[1, 2], [3]] * 10, LABELS, {}, ["several shapes"]),
    ],
)
def test_what_does_not(inputs: Any, labels: Any, options: dict, names: list[str]):
    with refused(names=names):
        Arrays(inputs, labels, **options).load()


def test_columns_of_frames_are_matched_by_their_names():
    dataset = Arrays(FRAME, LABELS, FRAME[["b", "a"]].assign(c=1), LABELS).load()
    assert list(dataset.input_names) == ["a", "b"]
    np.testing.assert_array_equal(dataset.train.inputs, dataset.test.inputs)
    assert not Arrays(FRAME.to_numpy(), LABELS).load().input_names
    with refused(names=["'b'", "test_inputs"]):
        Arrays(FRAME, LABELS, FRAME[["a"]], LABELS)


@pytest.mark.parametrize(
    "names", ["x_train y_train x_test y_test", "train_images train_labels test_images test_labels"]
)
def test_the_names_of_other_archives(tmp_path: Path, names: str):
    images, classes = np.arange(20 * 4, dtype=np.uint8).reshape(20, 2, 2), LABELS.astype(np.uint8)
    arrays = dict(zip(names.split(), (images, classes, images[:5], classes[:5]), strict=True))
    np.savez(tmp_path / "a.npz", allow_pickle=False, **arrays)
    dataset = make(Source, {"name": "arrays", "path": str(tmp_path / "a.npz")}).load()
    assert [len(dataset.train), len(dataset.test)] == [20, 5] and dataset.input_shape == (1, 2, 2)
    # The names that come first are taken, and nothing else is read.
    np.savez(
        tmp_path / "b.npz",
        inputs=images,
        labels=classes,
        x=np.array([{}], dtype=object),
        allow_pickle=True,
        **arrays,
    )
    assert len(make(Source, {"name": "arrays", "path": str(tmp_path / "b.npz")}).load().test) == 5
