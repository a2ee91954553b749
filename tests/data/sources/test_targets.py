"""Targets that are no classes: columns of a table, arrays, lists, texts."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.arrays import Arrays
from rayfl.data.sources.conversion import next_tokens
from rayfl.data.sources.text_files import sequences
from tests.refusals import refused


def load(name: str, path: Path, **options: object) -> Dataset:
    return checked_dataset(make(Source, {"name": name, "path": str(path), **options}).load())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    frame = pd.DataFrame({"age": np.arange(20.0), "price": np.arange(20) * 2.5, "sold": np.arange(20) % 2 == 0})
    frame.to_parquet(tmp_path / "houses.parquet")
    return tmp_path / "houses.parquet"


def test_columns_of_a_table_are_targets(table: Path):
    found = load("table", table, targets=["price", "sold"])
    assert (found.num_classes, found.input_shape, found.has_classes) == (2, (1,), False)
    assert found.columns["inputs"] == ["age"] and found.columns["labels"] == ["price", "sold"]
    assert found.train.labels.dtype == np.float32 and found.train.labels.shape == (16, 2)
    # Inputs are standardised, targets are not.
    assert found.train.labels[:, 0].max() > 40 and set(found.train.labels[:, 1]) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"targets": ["prise"]}, ["prise", "price"]),
        ({"targets": ["price"], "features": ["price"]}, ["price", "labels"]),
        ({"targets": ["price"], "labels": "sold"}, ["labels", "sold", "targets"]),
    ],
)
def test_wrong_targets_of_a_table_are_refused(table: Path, options: dict, names: list[str]):
    with refused(names=names):
        load("table", table, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_targets_are_finite(value: float):
    labels = np.ones((20, 2))
    labels[13, 1] = value
    with refused(names=["label", "row"]):
        checked_dataset(Arrays(np.ones((20, 3)), labels, np.ones((5, 3)), np.ones((5, 2))).load())


def test_both_splits_have_targets_of_one_shape():
    with refused(names=["labels", "[2]", "[3]"]):
        Arrays(np.ones((20, 3)), np.ones((20, 2)), np.ones((5, 3)), np.ones((5, 3))).load()


def test_texts_without_labels_predict_their_next_tokens(tmp_path: Path):
    tokens = np.array([[3, 4, 5, 6], [7, 8, 0, 0]] * 5)
    assert next_tokens(tokens)[:2].tolist() == [[4, 5, 6, -1], [8, -1, -1, -1]]
    np.savez(tmp_path / "texts.npz", inputs=tokens, test_inputs=tokens)
    found = load("arrays", tmp_path / "texts.npz", kind="text")
    assert (found.train.labels == next_tokens(tokens)).all() and (found.test.labels == next_tokens(tokens)).all()
    assert found.num_classes == found.num_tokens == 9
    with refused(names=["labels"]):
        load("arrays", tmp_path / "texts.npz")


def test_every_byte_of_a_text_but_the_first_is_a_target_once(tmp_path: Path):
    inputs, labels = sequences(b"abcdefgh", 3)
    letters = {ord(letter) + 1: letter for letter in "abcdefgh"} | {0: ".", -1: "."}
    as_text = ["".join(letters[token] for token in row) for part in (inputs, labels) for row in part]
    assert as_text == ["abc", "def", "g..", "bcd", "efg", "h.."]
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.txt").write_text(f"Hello, {name}. " * 20)
    found = load("text", tmp_path, length=16)
    assert found.kind == "text" and found.input_shape == (16,) and found.num_classes == 257
    assert set(found.train.groups) == {0, 1}  # type: ignore[arg-type]
    assert load("text", tmp_path / "ann.txt", length=16).train.groups is None


def test_what_is_no_text_is_refused(tmp_path: Path):
    with refused(names=[str(tmp_path), ".txt"]):
        load("text", tmp_path)
    with refused(names=["missing.txt", "data.path"]):
        load("text", tmp_path / "missing.txt")
    (tmp_path / "short.txt").write_text("a")
    with refused(names=["short.txt", "1 bytes", "2"]):
        load("text", tmp_path)
