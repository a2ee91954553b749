import functools
import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.loading import checked_dataset
from rayfl.data.sources import idx
from rayfl.data.sources.idx import MNIST, FashionMNIST
from rayfl.data.torchvision import torchvision
from tests.refusals import refused


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 0x08, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def write_four_files(folder: Path, num_train: int = 3, num_test: int = 2) -> None:
    """Train images filled with 1, 2, ... and test images with 101, 102, ...; labels count up from 0."""
    for split, number, first in (("train", num_train, 1), ("t10k", num_test, 101)):
        filled = np.arange(first, first + number, dtype=np.uint8)
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", filled[:, None, None].repeat(28, 1).repeat(28, 2))
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", np.arange(number, dtype=np.uint8))


@contextmanager
def mirror_of(folder: Path) -> Iterator[str]:
    """The address of a web server on this machine that serves `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("source", [MNIST, FashionMNIST])
def test_four_files_in_a_root(tmp_path, source):
    write_four_files(tmp_path)
    dataset = source(root=tmp_path).load()
    assert dataset.train.inputs.shape == (3, 1, 28, 28)
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert dataset.test.inputs[:, 0, 27, 27].tolist() == [101, 102]
    assert (dataset.train.labels.dtype, dataset.train.labels.tolist()) == (np.int64, [0, 1, 2])
    assert (dataset.name, dataset.num_classes, dataset.kind) == (source.name, 10, "image")
    black = dataset.prepare(np.zeros((1, 1, 28, 28), np.uint8))
    assert black[0, 0, 0, 0].item() == pytest.approx(-source.mean / source.std)


def test_padding_frames_the_images_in_black(tmp_path):
    write_four_files(tmp_path)
    dataset = MNIST(root=tmp_path, padding=2).load()
    assert dataset.input_shape == dataset.test.inputs.shape[1:] == (1, 32, 32)
    assert dataset.train.inputs[2, 0, 2:30, 2:30].tolist() == [[3] * 28] * 28
    assert dataset.train.inputs.sum(axis=(1, 2, 3), dtype=int).tolist() == [784, 2 * 784, 3 * 784]


def test_a_missing_file_is_named(tmp_path):
    write_four_files(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with refused(names=["t10k-labels-idx1-ubyte.gz", "data.root"]):
        MNIST(root=tmp_path).load()


def test_labels_must_fit_the_images(tmp_path):
    write_four_files(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))
    with refused(names=["train-labels-idx1-ubyte.gz", "3 train inputs", "labels", "[4]"]):
        checked_dataset(MNIST(root=tmp_path).load())


def test_fashion_mnist_is_read_from_debians_package(tmp_path, monkeypatch):
    write_four_files(tmp_path)
    monkeypatch.setattr(idx, "FASHION_MNIST_OF_DEBIAN", tmp_path)
    assert len(FashionMNIST().load().train) == 3


@pytest.mark.parametrize("source", [MNIST, FashionMNIST])
def test_torchvision_downloads_where_nothing_is_here(tmp_path, monkeypatch, source):
    served, cache = tmp_path / "served", tmp_path / "cache"
    served.mkdir()
    write_four_files(served)
    kind = getattr(torchvision().datasets, source.__name__)
    resources = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(served.iterdir())]
    monkeypatch.setattr(kind, "resources", resources)
    monkeypatch.setattr(idx, "FASHION_MNIST_OF_DEBIAN", tmp_path / "absent")
    with mirror_of(served) as address:
        monkeypatch.setattr(kind, "mirrors", [address])
        dataset = source(cache=cache).load()
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3]
    # The mirror is gone now, and the cache serves.
    assert len(source(cache=cache).load().test) == 2


@pytest.mark.parametrize(
    ("source", "advice"), [(MNIST, "idx files"), (FashionMNIST, "apt-get install dataset-fashion")]
)
def test_an_impossible_download_is_one_sentence(tmp_path, monkeypatch, source, advice):
    kind = getattr(torchvision().datasets, source.__name__)
    monkeypatch.setattr(kind, "mirrors", [f"{(tmp_path / 'nowhere').as_uri()}/"])
    monkeypatch.setattr(idx, "FASHION_MNIST_OF_DEBIAN", tmp_path / "absent")
    with refused(names=[source.name, "downloaded", advice]) as error:
        source(cache=tmp_path / "cache").load()
    assert "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    with refused(names=["mnist", "this machine", "cache/MNIST"]):
        MNIST(cache=tmp_path / "cache").load()
