"""Data that no model can train on are refused as they are loaded, with their file and the first bad row."""

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl.data import loading
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.loading import checked_dataset, first_row, keeping_datasets, read_dataset, whole_labels
from rayfl.data.sources.arrays import ArrayFiles
from tests.refusals import refused

VECTORS = Examples(np.ones((6, 3), np.float32), np.arange(6) % 2, np.arange(6), "mine.npz")
TOKENS = Examples(np.ones((6, 3), np.int64), np.arange(6) % 2, place="texts")
GOOD = Dataset("good", VECTORS, VECTORS, 2, "vector")
TEXT = Dataset("text", TOKENS, TOKENS, 2, "text", vocabulary=9)


def changed(array: np.ndarray, row: int, value: float) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array


def test_good_data_pass_as_they_are():
    assert checked_dataset(GOOD) is GOOD and checked_dataset(TEXT) is TEXT


@pytest.mark.parametrize(
    ("examples", "names"),
    [
        ({"inputs": np.ones((6, 0), np.float32)}, ["mine.npz", "[6, 0]"]),
        ({"inputs": np.ones(6, np.float32)}, ["mine.npz", "[6]"]),
        ({"labels": np.zeros(5, int)}, ["mine.npz", "6 test inputs", "labels", "[5]"]),
        ({"groups": np.zeros((6, 1), int)}, ["mine.npz", "6 test inputs", "owners", "[6, 1]"]),
        (
            {"inputs": changed(VECTORS.inputs, 4, np.inf)},
            ["mine.npz", "NaN", "row 4"],
        ),
        (
            {"labels": changed(VECTORS.labels, 3, 2)},
            ["mine.npz", "test label 2", "row 3", "0 to 1"],
        ),
        (
            {"labels": changed(VECTORS.labels, 3, -1)},
            ["mine.npz", "test label -1", "row 3", "0 to 1"],
        ),
        ({"labels": np.full(6, 0.5)}, ["mine.npz", "test labels", "float64", "whole numbers"]),
        ({"inputs": np.ones((6, 4))}, ["mine.npz", "[3]", "[4]", "both"]),
        ({"place": "", "labels": changed(VECTORS.labels, 0, 9)}, ["good", "test label 9", "row 0", "0 to 1"]),
    ],
)
def test_the_sentence_names_file_and_row(examples: dict, names: list[str]):
    with refused(names=names):
        checked_dataset(replace(GOOD, test=replace(VECTORS, **examples)))


def test_tokens_are_below_the_vocabulary():
    for value in (-1, 9):
        with refused(names=["texts", f"token {value}", "row 5", "0 to 8"]):
            checked_dataset(replace(TEXT, train=replace(TOKENS, inputs=changed(TOKENS.inputs, 5, value))))
    assert checked_dataset(replace(TEXT, vocabulary=None))


def test_labels_become_whole_numbers_and_none_is_rounded():
    for labels in (np.array([0.0, 3.0]), np.array([0, 3], np.uint8), np.array([False, True])):
        assert whole_labels("here", "train", labels).dtype == np.int64
    for wrong in (3.5, np.nan, np.inf, -1.0, 1e18):
        with refused(names=["here", "row 1", "whole numbers"]):
            whole_labels("here", "train", np.array([3.0, wrong]))


def test_rows_are_counted_through_the_pieces_of_a_large_array(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 48)
    values = changed(np.ones((10, 3)), 7, np.nan)
    seen = []
    assert first_row(values, lambda part: seen.append(len(part)) or np.isnan(part)) == 7
    assert seen == [2, 2, 2, 2]


def test_a_dataset_that_somebody_holds_is_loaded_once(tmp_path: Path) -> None:
    def written(value: float) -> ArrayFiles:
        np.savez(tmp_path / "data.npz", inputs=np.full((8, 2), value, np.float32), labels=np.arange(8) % 2)
        return ArrayFiles(path=str(tmp_path / "data.npz"))

    first = read_dataset(written(1.0))
    assert read_dataset(ArrayFiles(path=str(tmp_path / "data.npz"))) is first
    second = read_dataset(written(2.0))
    assert (first.train.inputs.max(), second.train.inputs.max()) == (1.0, 2.0)


def test_datasets_are_kept_for_a_block_and_no_longer(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", inputs=np.ones((8, 2), np.float32), labels=np.arange(8) % 2)
    source = ArrayFiles(path=str(tmp_path / "data.npz"))
    with keeping_datasets([source]):
        kept = weakref.ref(read_dataset(source))
        assert kept() is not None
    assert kept() is None
