"""Files of examples that would fill the memory, never end, or are not what they say."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.images import read_image
from rayfl.data.torchvision import torchvision
from tests.refusals import refused

PIXEL = np.zeros((2, 1, 1), np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes())


def load(name: str, **options: object) -> Dataset:
    return checked_dataset(make(Source, {"name": name, **options}).load())


def png(width: int, height: int, *chunks: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (png(10_000, 10_000), ["Image size", "100000000 pixels"]),
        (png(2**31 - 1, 2**31 - 1), ["Image size"]),
        (png(4, 4), []),
        (b"no image", ["PNG"]),
        (b"", ["PNG"]),
    ],
)
def test_an_image_bomb_and_what_is_no_image(tmp_path: Path, content: bytes, names: list[str]):
    (tmp_path / "a.png").write_bytes(content)
    with refused(names=[tmp_path / "a.png", "repair or remove it", *names]):
        read_image(tmp_path / "a.png")


def test_a_pipe_among_the_images(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "a.png")
    with refused(names=["a.png", "pipe", "remove"]):
        load("image-folder", path=str(tmp_path))


def test_images_that_would_be_larger_than_the_memory_are_refused(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    with refused(names=["side=1000000000", "[1, 8192]"]):
        load("image-folder", path=str(tmp_path), side=10**9)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"num_groups": 10**12},
            ["num_groups=1000000000000", "samples_per_group=drawn", "dim=60", "num_classes=10"],
        ),
        (
            {"dim": 10**13},
            ["num_groups=30", "samples_per_group=drawn", "dim=10000000000000", "num_classes=10"],
        ),
        ({"samples_per_group": 10**12}, ["num_groups=30", "samples_per_group=1000000000000", "dim=60"]),
        (
            {"shape": (10**6, 10**6, 10**6)},
            ["num_groups=30", "samples_per_group=drawn", "shape=[1000000, 1000000, 1000000]"],
        ),
        ({"num_classes": 10**9}, ["num_classes=1000000000", "[2, 1e+06]"]),
        (
            {"num_classes": 10**6, "dim": 10**6},
            ["num_groups=30", "dim=1000000", "num_classes=1000000"],
        ),
    ],
)
def test_synthetic_data_larger_than_the_memory(options: dict, names: list[str]):
    with refused(names=names):
        load("synthetic", **options)


def test_reviews_longer_than_the_memory(tmp_path: Path):
    for half in ("train", "test"):
        for sentiment in ("neg", "pos"):
            (tmp_path / half / sentiment).mkdir(parents=True)
            (tmp_path / half / sentiment / "1.txt").write_text("fine")
    assert load("imdb", root=str(tmp_path), length=3, vocabulary=10**12).num_tokens == 10**12
    with refused(names=["data.length=1000000000000", "2 reviews", "16.0 TB", "this machine"]):
        load("imdb", root=str(tmp_path), length=10**12)


def test_labels_of_a_built_in_set_are_in_range_and_whole(tmp_path: Path):
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", PIXEL)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", np.array([3, 9], np.uint8))
    assert load("mnist", root=str(tmp_path)).test.labels.tolist() == [3, 9]
    write_idx(labels, np.array([3, 10], np.uint8))
    with refused(names=[labels, "test label 10", "row 1", "0 to 9"]):
        load("mnist", root=str(tmp_path))
    labels.write_bytes(bytes([0, 0, 0x0D, 1]) + struct.pack(">I2f", 2, 3.5, 1))
    with refused(names=[labels, "IDX", "bytes"]):
        load("mnist", root=str(tmp_path))


def test_a_damaged_set_is_not_said_to_be_missing(tmp_path: Path):
    with refused(names=["imdb", "this machine", tmp_path / "none"]):
        load("imdb", root=str(tmp_path / "none"))
    with refused(names=["imdb", "damaged", tmp_path / "train"]):
        load("imdb", root=str(tmp_path))


def test_a_home_that_nobody_knows_is_named():
    for name in ("mnist", "cifar10", "imdb"):
        with refused(names=["~nobody-there/x", "home folder"]):
            load(name, root="~nobody-there/x")


def test_a_download_with_a_wrong_checksum_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    utils = torchvision().datasets.utils
    monkeypatch.setattr(utils, "_get_redirect_url", lambda url, **options: url)
    monkeypatch.setattr(utils, "_urlretrieve", lambda url, filename, **options: Path(filename).write_bytes(b"other"))
    for name in ("mnist", "cifar10"):
        with refused(names=[name, "checksum"]):
            load(name, cache=str(tmp_path))


def test_tables_that_are_pipes_or_no_tables(tmp_path: Path):
    os.mkfifo(tmp_path / "a.csv")
    with refused(names=[tmp_path / "a.csv", "pipe"]):
        load("table", path=str(tmp_path / "a.csv"))
    for name, content in (("b.parquet", b"PAR1" + b"\xff" * 40 + b"PAR1"), ("c.csv", b"")):
        (tmp_path / name).write_bytes(content)
        with refused(names=[tmp_path / name]):
            load("table", path=str(tmp_path / name))
