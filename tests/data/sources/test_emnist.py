import hashlib
import zipfile

import numpy as np
import pytest

from rayfl.data.datasets import moments
from rayfl.data.sources.mnist import EMNIST
from rayfl.data.torchvision import torchvision
from tests.data.files import numbered
from tests.data.sources.test_mnist import mirror_of, write_idx
from tests.refusals import refused


def write_split(folder, split, first_label=0):
    """Train images filled with 51 and 102, one test image filled with 7; labels count up from `first_label`."""
    for half, images in (("train", np.array([51, 102])), ("test", np.array([7]))):
        filled = images.astype(np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        write_idx(folder / f"emnist-{split}-{half}-images-idx3-ubyte.gz", filled)
        labels = np.arange(first_label, first_label + len(images)).astype(np.uint8)
        write_idx(folder / f"emnist-{split}-{half}-labels-idx1-ubyte.gz", labels)


@pytest.mark.parametrize(
    ("split", "first", "num_classes"), [("balanced", 0, 47), ("byclass", 0, 62), ("letters", 1, 26), ("digits", 0, 10)]
)
def test_each_split_has_its_files_and_its_classes(tmp_path, split, first, num_classes):
    write_split(tmp_path, split, first)
    dataset = EMNIST(root=tmp_path, split=split).load()
    assert (dataset.train.inputs.shape, dataset.train.inputs.dtype) == ((2, 1, 28, 28), np.uint8)
    assert dataset.test.inputs[0, 0, 5, 5] == 7
    assert (dataset.train.labels.tolist(), dataset.num_classes) == ([0, 1], num_classes)
    # 51 and 102 are 0.2 and 0.4: mean 0.3, deviation 0.1, so they become -1 and 1.
    assert dataset.prepare(dataset.train.inputs)[:, 0, 9, 9].tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_another_splits_files_do_not_do(tmp_path):
    write_split(tmp_path, "digits")
    with refused(names=["emnist-letters-train-images-idx3-ubyte", "gzip.zip", "data.root"]):
        EMNIST(root=tmp_path, split="letters").load()


def test_torchvision_downloads_where_nothing_is_here(tmp_path, monkeypatch):
    (tmp_path / "gzip").mkdir()
    split_files = [("balanced", 0), ("byclass", 0), ("bymerge", 0), ("letters", 1), ("digits", 0), ("mnist", 0)]
    for split, first in split_files:
        write_split(tmp_path / "gzip", split, first)
    archive = tmp_path / "gzip.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted((tmp_path / "gzip").iterdir()):
            packed.write(path, f"gzip/{path.name}")
    kind = torchvision().datasets.EMNIST
    monkeypatch.setattr(kind, "md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with mirror_of(tmp_path) as address:
        monkeypatch.setattr(kind, "url", f"{address}gzip.zip")
        assert EMNIST(cache=tmp_path / "cache", split="letters").load().train.labels.tolist() == [0, 1]
    # The server is gone now, and the cache has all splits.
    assert EMNIST(cache=tmp_path / "cache", split="byclass").load().num_classes == 62


def test_an_impossible_download_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision().datasets.EMNIST, "url", (tmp_path / "nowhere.zip").as_uri())
    with refused(names=["emnist", "downloaded", "data.root"]) as error:
        EMNIST(cache=tmp_path / "cache").load()
    assert "\n" not in str(error.value)


def test_moments_are_those_of_numpy_over_many_chunks(monkeypatch):
    monkeypatch.setattr("rayfl.data.datasets.MOMENTS_CHUNK", 3)
    images = np.random.default_rng(0).integers(0, 256, (10, 2, 4, 5)).astype(np.uint8)
    mean, std = moments(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)), rtol=1e-12)
    assert moments(numbered(5, 1, (1, 2, 2))) == ((pytest.approx(5 / 255),), (1.0,))
