"""Data mapped from files: taken apart and put together again, unless a file is not the one it was."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.datasets import Dataset, Samples
from rayfl.data.file_digest import sample_digest
from rayfl.data.mapped import ArrayFile, MappedDataset, mapped


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Train inputs and labels in files, the rest in memory."""
    inputs = np.random.default_rng(0).integers(0, 256, (3000, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "labels.npy", np.arange(3000) % 3)
    train = Samples(mapped(tmp_path / "inputs.npy"), mapped(tmp_path / "labels.npy"), np.arange(3000))
    return Dataset("toy", train, Samples(inputs[:5], np.zeros(5, dtype=np.int64)), 3, "image")


def test_what_travels_lacks_what_is_mapped(dataset: Dataset) -> None:
    apart = MappedDataset.of(dataset)
    assert set(apart.files) == {("train", "inputs"), ("train", "labels")}
    content = pickle.dumps(apart)
    # The owners, 8 bytes each, are in memory and travel.
    assert 24_000 < len(content) < 30_000
    found = pickle.loads(content).open()  # noqa: S301
    assert found is not None and found.name == "toy"
    for split in ("train", "test"):
        there, here = getattr(dataset, split), getattr(found, split)
        assert np.array_equal(there.inputs, here.inputs) and np.array_equal(there.labels, here.labels)
    assert isinstance(found.train.inputs.base, np.memmap) and found.train.groups.tolist() == list(range(3000))
    assert found.input_shape == (1, 8, 8)


def test_files_that_are_gone_or_others_are_not_mapped(dataset: Dataset, tmp_path: Path) -> None:
    apart, path = MappedDataset.of(dataset), tmp_path / "inputs.npy"
    content = path.read_bytes()
    for other in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b"x" * len(content)):
        path.write_bytes(other)
        assert apart.open() is None
    path.write_bytes(content)
    assert apart.open() is not None
    path.unlink()
    assert apart.open() is None
    # Nobody else could map it.
    assert ("train", "inputs") not in MappedDataset.of(dataset).files


def test_only_whole_arrays_are_mapped(dataset: Dataset) -> None:
    inputs = dataset.train.inputs
    assert ArrayFile.of(inputs) is not None
    for other in (inputs[1:], inputs[::2], inputs.copy(), inputs.transpose(0, 1, 3, 2), np.arange(3)):
        assert ArrayFile.of(other) is None
    plain = replace(dataset, train=dataset.test)
    again = MappedDataset.of(plain)
    assert not again.files and (found := again.open()) and found.train is plain.train and found.test is plain.test


def test_the_ends_of_a_large_file_are_compared_and_much_between(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = bytearray(np.random.default_rng(0).bytes(8 << 20))
    path.write_bytes(content)
    before = sample_digest(path)
    for place in (0, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        assert sample_digest(path) != before
        content[place] ^= 1
    path.write_bytes(content[: 4 << 20] + bytes(1 << 18) + content[(4 << 20) + (1 << 18) :])
    assert sample_digest(path) != before
