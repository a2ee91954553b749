"""Files of samples that would fill the memory, never end, or are not what they say."""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.data.check import checked_dataset
from rayfl.data.datasets import Dataset, Source
from rayfl.data.sources.fetch import download
from rayfl.data.sources.image_file import read_image
from rayfl.data.sources.leaf import read_leaf
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError

PIXEL = np.zeros((2, 1, 1), np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes())


def load(name: str, **options: object) -> Dataset:
    return checked_dataset(make(Source, {"name": name, **options}).load())


def refusal(name: str, **options: object) -> str:
    with pytest.raises(RayflError) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def png(width: int, height: int, *chunks: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (png(9000, 9000), "it is 9000x9000 pixels, more than the 80,000,000 that are decoded"),
        (png(2**31 - 1, 2**31 - 1), "Image size"),
        (png(4, 4), ""),
        (b"no image", "cannot identify image file"),
        (b"", "cannot identify image file"),
    ],
)
def test_an_image_bomb_and_what_is_no_image(tmp_path: Path, content: bytes, why: str):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(RayflError) as caught:
        read_image(tmp_path / "a.png", "mend or remove it")
    assert str(caught.value).startswith(f"{tmp_path / 'a.png'} cannot be read ({why}")
    assert str(caught.value).endswith("); mend or remove it")


def test_a_pipe_among_the_images(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "a.png")
    assert "a.png cannot be read (it is a pipe, and only regular files are opened); mend" in refusal(
        "image-folder", path=str(tmp_path)
    )


def test_images_larger_than_the_memory_are_refused_before_they_are_scaled(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"")
    assert refusal("image-folder", path=str(tmp_path), side=10**9).startswith(
        "data.side=1000000000 for 1 images takes 3.0 EB of memory, and this machine has"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"num_groups": 10**12},
            "data with num_groups=1000000000000, samples_per_group=drawn, dim=60, num_classes=10 takes",
        ),
        (
            {"dim": 10**13},
            "data with num_groups=30, samples_per_group=drawn, dim=10000000000000, num_classes=10 takes 60",
        ),
        ({"samples_per_group": 10**12}, "data with num_groups=30, samples_per_group=1000000000000, dim=60, num_cla"),
        (
            {"shape": (10**6, 10**6, 10**6)},
            "data with num_groups=30, samples_per_group=drawn, shape=[1000000, 1000000, 1000000],",
        ),
        ({"num_classes": 10**9}, "num_classes=1000000000 is not allowed; it must be a whole number in [2, 1e+06]"),
        ({"num_classes": 10**6, "dim": 10**6}, "data with num_groups=30, samples_per_group=drawn, dim=1000000, num_"),
    ],
)
def test_synthetic_data_larger_than_the_memory(options: dict, sentence: str):
    assert refusal("synthetic", **options).startswith(sentence)


def test_reviews_longer_than_the_memory(tmp_path: Path):
    for half in ("train", "test"):
        for sentiment in ("neg", "pos"):
            (tmp_path / half / sentiment).mkdir(parents=True)
            (tmp_path / half / sentiment / "1.txt").write_text("fine")
    assert load("imdb", root=str(tmp_path), length=3, vocabulary=10**12).num_tokens == 10**12
    assert refusal("imdb", root=str(tmp_path), length=10**12).startswith(
        "data.length=1000000000000 for 2 reviews takes 16.0 TB of memory, and this machine has"
    )


def test_labels_of_a_built_in_set_are_in_range_and_whole(tmp_path: Path):
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", PIXEL)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", np.array([3, 9], np.uint8))
    assert load("mnist", root=str(tmp_path)).test.labels.tolist() == [3, 9]
    write_idx(labels, np.array([3, 10], np.uint8))
    assert refusal("mnist", root=str(tmp_path)) == (
        f"{labels} has the test label 10 (row 1, counted from 0); labels are whole numbers from 0 to 9"
    )
    labels.write_bytes(bytes([0, 0, 0x0D, 1]) + struct.pack(">I2f", 2, 3.5, 1))
    assert refusal("mnist", root=str(tmp_path)).startswith(
        f"{labels} has the label 3.5 (row 0, counted from 0); labels"
    )
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(bytes([0, 0, 0x0D, 3]) + struct.pack(">3I2f", 2, 1, 1, 0, 0))
    assert "has values of type float32, and images are bytes" in refusal("mnist", root=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"users": ' + "[" * 100_000, "its lists are nested too deep"),
        ("{", "line 1 is no JSON"),
        ("9" * 5000, "its parts are not lists, or their lengths differ"),
        ("[]", "its parts are not lists, or their lengths differ"),
        ("{}", "it has no 'users'"),
        (json.dumps({"users": ["a"], "num_samples": [], "user_data": {}}), "its parts are not lists, or their lengths"),
        (
            json.dumps({"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": 3, "y": 1}}}),
            "its parts are not li",
        ),
    ],
)
def test_json_that_is_not_leafs(tmp_path: Path, content: str, fault: str):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(RayflError, match=f"a.json is not a JSON file of LEAF with users, .*{fault}"):
        list(read_leaf(tmp_path))


def test_a_damaged_set_is_not_said_to_be_missing(tmp_path: Path):
    assert refusal("cinic10", root=str(tmp_path / "none")).startswith(
        "cinic10 is not on this machine (there is no folder"
    )
    assert refusal("cinic10", root=str(tmp_path)).startswith(
        f"cinic10 is incomplete or damaged ({tmp_path / 'train'} has"
    )


def test_a_home_that_nobody_knows_is_named():
    for name in ("mnist", "emnist", "cifar10", "cinic10", "imdb"):
        assert refusal(name, root="~nobody-there/x").startswith(
            "~nobody-there/x: nobody knows the home folder ~nobody-th"
        )


def test_a_download_with_a_wrong_checksum_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    utils = torchvision().datasets.utils
    monkeypatch.setattr(utils, "_get_redirect_url", lambda url, **options: url)
    monkeypatch.setattr(utils, "_urlretrieve", lambda url, filename, **options: Path(filename).write_bytes(b"other"))
    for name, kind in (("mnist", "MNIST"), ("cifar10", "CIFAR10"), ("emnist", "EMNIST")):
        options = {"split": "digits"} if name == "emnist" else {}
        with pytest.raises(RayflError, match=f"^{name} is not on this .*is not the published file: its checksum is an"):
            download(name, kind, tmp_path, "fetch it", **options)


def test_tables_that_are_pipes_or_no_tables(tmp_path: Path):
    os.mkfifo(tmp_path / "a.csv")
    assert "a.csv cannot be read (it is a pipe, and only regular" in refusal("table", path=str(tmp_path / "a.csv"))
    for name, content in (("b.parquet", b"PAR1" + b"\xff" * 40 + b"PAR1"), ("c.csv", b"")):
        (tmp_path / name).write_bytes(content)
        assert f"{name} cannot be read (" in refusal("table", path=str(tmp_path / name))
