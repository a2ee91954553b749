"""Files in LIBSVM's format: sparse rows become arrays, labels classes or numbers to predict."""

import bz2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from tests.refusals import refused

LINES = "+1 1:0.5 3:2 # a comment\n-1 2:1\n\n-1\n+1 4:1e-1\n"


def load(path: Path, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": "libsvm", "path": str(path), **options}).load())


@pytest.mark.parametrize("packed", [False, True])
def test_rows_become_arrays(tmp_path: Path, packed: bool):
    content = LINES.encode()
    (tmp_path / "a9a").write_bytes(bz2.compress(content) if packed else content)
    (tmp_path / "a9a.t").write_text("-1 5:3\n+1 qid:7 1:1\n")
    dataset = load(tmp_path / "a9a", test_path=str(tmp_path / "a9a.t"))
    expected = np.array([[0.5, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0.1, 0]], np.float32)
    np.testing.assert_array_equal(dataset.train.inputs, expected)
    assert dataset.train.labels.tolist() == [1, 0, 0, 1] and list(dataset.classes) == ["-1", "1"]
    assert dataset.test.inputs.tolist() == [[0, 0, 0, 0, 3], [1, 0, 0, 0, 0]] and dataset.test.labels.tolist() == [0, 1]
    assert load(tmp_path / "a9a", num_features=9, test_share=0.5).input_shape == (9,)


def test_fractions_are_numbers_to_predict(tmp_path: Path):
    (tmp_path / "housing").write_text("24.5 1:1\n21 2:1\n")
    assert load(tmp_path / "housing", test_share=0.5).train.labels.shape == (1, 1)


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        ("1 1:2\n1 two:3\n", {}, ["row 1", "'1 two:3'", "PLACE:VALUE"]),
        ("1 0:2\n", {}, ["row 0", "places count from 1"]),
        ("cat 1:2\n", {}, ["row 0", "'cat 1:2'"]),
        ("nan 1:2\n", {}, ["label", "NaN"]),
        ("", {}, ["no lines"]),
        (LINES, {"num_features": 3}, ["data.num_features=3", "place 4"]),
    ],
)
def test_what_is_not_of_the_format(tmp_path: Path, content: str, options: dict, names: list[str]):
    (tmp_path / "a9a").write_text(content)
    with refused(names=["a9a", *names]):
        load(tmp_path / "a9a", **options)
