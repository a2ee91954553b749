"""Data that no model can train on are refused as they are loaded, with their file and the first bad row."""

from dataclasses import replace

import numpy as np
import pytest

from rayfl.data import check
from rayfl.data.check import checked_dataset, first_row, whole_labels
from rayfl.data.datasets import Dataset, Samples
from rayfl.errors import RayflError

VECTORS = Samples(np.ones((6, 3), np.float32), np.arange(6) % 2, np.arange(6), "mine.npz")
TOKENS = Samples(np.ones((6, 3), np.int64), np.arange(6) % 2, place="texts")
GOOD = Dataset("good", VECTORS, VECTORS, 2, "vector")
TEXT = Dataset("text", TOKENS, TOKENS, 2, "text", vocabulary=9)


def changed(array: np.ndarray, row: int, value: float) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array


def test_good_data_pass_as_they_are():
    assert checked_dataset(GOOD) is GOOD and checked_dataset(TEXT) is TEXT


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        ({"inputs": np.ones((6, 0), np.float32)}, "mine.npz has test inputs of shape [6, 0]; give at least one sample"),
        ({"inputs": np.ones(6, np.float32)}, "mine.npz has test inputs of shape [6]; give at least one sample"),
        ({"labels": np.zeros(5, int)}, "mine.npz has 6 test inputs and labels of shape [5]; give one of them for each"),
        ({"groups": np.zeros((6, 1), int)}, "mine.npz has 6 test inputs and owners of shape [6, 1]; give one of them"),
        (
            {"inputs": changed(VECTORS.inputs, 4, np.inf)},
            "mine.npz has a test input that is NaN or infinite (row 4, cou",
        ),
        (
            {"labels": changed(VECTORS.labels, 3, 2)},
            "mine.npz has the test label 2 (row 3, counted from 0); labels are ",
        ),
        (
            {"labels": changed(VECTORS.labels, 3, -1)},
            "mine.npz has the test label -1 (row 3, counted from 0); labels ar",
        ),
        ({"labels": np.full(6, 0.5)}, "mine.npz has test labels of type float64; classes are whole numbers from 0"),
        ({"inputs": np.ones((6, 4))}, "mine.npz has train inputs of shape [3] and test inputs of shape [4]; give both"),
        ({"place": "", "labels": changed(VECTORS.labels, 0, 9)}, "dataset 'good' has the test label 9 (row 0, counted"),
    ],
)
def test_the_sentence_names_file_and_row(samples: dict, sentence: str):
    with pytest.raises(RayflError) as caught:
        checked_dataset(replace(GOOD, test=replace(VECTORS, **samples)))
    assert str(caught.value).startswith(sentence)


def test_tokens_are_below_the_vocabulary():
    for value in (-1, 9):
        with pytest.raises(RayflError, match=rf"^texts has the token {value} in a train input \(row 5, .*are 0 to 8$"):
            checked_dataset(replace(TEXT, train=replace(TOKENS, inputs=changed(TOKENS.inputs, 5, value))))
    assert checked_dataset(replace(TEXT, vocabulary=None))


def test_labels_become_whole_numbers_and_none_is_rounded():
    for labels in (np.array([0.0, 3.0]), np.array([0, 3], np.uint8), np.array([False, True])):
        assert whole_labels("here", "train", labels).dtype == np.int64
    for wrong in (3.5, np.nan, np.inf, -1.0, 1e18):
        with pytest.raises(RayflError, match=r"^here has the train label .* \(row 1, counted from 0\); labels are who"):
            whole_labels("here", "train", np.array([3.0, wrong]))


def test_rows_are_counted_through_the_pieces_of_a_large_array(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "_CHUNK_BYTES", 48)
    values = changed(np.ones((10, 3)), 7, np.nan)
    seen = []
    assert first_row(values, lambda part: seen.append(len(part)) or np.isnan(part)) == 7
    assert seen == [2, 2, 2, 2]
