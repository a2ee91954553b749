"""Split folders and split files are found by their names, wherever they may lie, and never become classes or owners."""

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.limits import memory
from tests.refusals import check_sentence, refused


def load(name: str, path: Path, **options: object) -> Dataset:
    return checked_dataset(make(Source, {"name": name, "path": str(path), **options}).load())


def shades(home: Path, folders: Mapping[str, list[int]]) -> Path:
    """One image of each shade in each folder."""
    for folder, values in folders.items():
        (home / folder).mkdir(parents=True, exist_ok=True)
        for shade in values:
            Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(home / folder / f"{shade:03}.png")
    return home


def first(examples: np.ndarray) -> list[int]:
    """The shade of each image."""
    return examples.reshape(len(examples), -1)[:, 0].tolist()


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "val"),
        ("train", "valid"),
        ("train", "validation"),
        ("Train", "Test"),
        ("TRAINING", "Testing"),
        ("training_set", "test_set"),
        ("train2017", "val2017"),
        ("Training", "dev"),
    ],
)
def test_folders_named_as_splits_are_splits(tmp_path: Path, train: str, test: str):
    shades(tmp_path, {f"{train}/cat": [40, 41], f"{train}/dog": [80], f"{test}/cat": [140], f"{test}/dog": [180, 181]})
    found = load("image-folder", tmp_path)
    assert (first(found.train.inputs), first(found.test.inputs)) == ([40, 41, 80], [140, 180, 181])
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 0, 1], [0, 1, 1])
    assert list(found.classes) == ["cat", "dog"]


def test_a_folder_above_the_classes_is_refused(tmp_path: Path):
    shades(tmp_path, {"photos/cat": [40, 41], "photos/dog": [80]})
    with refused(names=["'photos'", "cat and dog", "data.path", str(tmp_path / "photos")]):
        load("image-folder", tmp_path)


def test_train_alone_is_cut_and_val_beside_test_is_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shades(tmp_path / "one", {"Train/a": [40, 41, 42], "Train/b": [80, 81]})
    found = load("image-folder", tmp_path / "one", test_share=0.2)
    assert (len(found.train), len(found.test), list(found.classes)) == (4, 1, ["a", "b"])
    shades(tmp_path / "three", {"train/a": [40], "val/a": [90], "test/a": [140], "unlabelled": [200]})
    found = load("image-folder", tmp_path / "three")
    assert (first(found.train.inputs), first(found.test.inputs)) == ([40], [140])
    for left_out in ("val", "unlabelled"):
        (notice,) = [one for one in caplog.messages if str(tmp_path / "three" / left_out) in one]
        check_sentence(notice, ["not read", "split"])


@pytest.mark.parametrize("test", ["test", "Val"])
def test_owners_may_have_splits_of_their_own(tmp_path: Path, test: str):
    shades(tmp_path, {"north/train/a": [40], "north/train/b": [41], f"north/{test}/a": [140], "south/Training/b": [80]})
    shades(tmp_path, {"south/testing/b": [180]})
    found = load("image-folder", tmp_path, owners="folder")
    assert list(found.classes) == ["a", "b"]
    assert found.train.groups is not None and found.test.groups is not None
    assert (first(found.train.inputs), found.train.groups.tolist()) == ([40, 41, 80], [0, 0, 1])
    assert (first(found.test.inputs), found.test.groups.tolist()) == ([140, 180], [0, 1])
    shades(tmp_path, {"west/b": [90]})
    with refused(names=["west", "north", "train"]):
        load("image-folder", tmp_path, owners="folder")


@pytest.mark.parametrize(
    ("folders", "owners", "names"),
    [
        (["train/a", "train/b", "other/a"], None, ["train", "other", "rename"]),
        (["Test/a", "other"], None, ["Test", "other", "rename"]),
        (["val/a", "test/a"], None, ["val", "test", "no train"]),
        (["train/a", "Train/a", "test/a"], None, ["train", "Train", "both"]),
        (["train/a", "val/a", "valid/a"], None, ["val", "valid", "both"]),
        (["north/train/a", "north/test/a"], None, ["north", "train", "test", "data.owners='folder'"]),
        (["north/train/a", "south/train/a"], None, ["north", "train", "data.owners='folder'"]),
        (["cat/train", "cat/test", "dog/train"], None, ["cat", "train", "PATH/train"]),
        (["north/cat/train", "north/cat/test"], "folder", ["cat", "train", "PATH/train"]),
        (["training_set/training_set/a", "test_set/test_set/a"], None, ["training_set", "data.path"]),
        (["train", "test"], None, ["no images", "class folders"]),
    ],
)
def test_what_may_be_a_split_or_not_is_refused(
    tmp_path: Path, folders: list[str], owners: str | None, names: list[str]
):
    shades(tmp_path, {folder: [40, 80, 120] for folder in folders})
    with refused(names=names):
        load("image-folder", tmp_path, owners=owners)


def test_a_class_may_be_called_train(tmp_path: Path):
    shades(tmp_path, {"bus": [40, 41], "train": [80, 81], "train/steam": [82]})
    with refused(names=["train", "bus"]):
        load("image-folder", tmp_path)
    (tmp_path / "train" / "steam" / "082.png").unlink()
    (tmp_path / "train" / "steam").rmdir()
    assert list(load("image-folder", tmp_path, test_share=0.25).classes) == ["bus", "train"]


def text(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def bytes_of(inputs: np.ndarray) -> bytes:
    """The bytes of tokens without padding."""
    return bytes(int(token) - 1 for token in inputs.ravel() if token)


@pytest.mark.parametrize(
    ("train", "test"), [("train.txt", "valid.txt"), ("Train.txt", "Test.txt"), ("ptb.train.txt", "ptb.test.txt.gz")]
)
def test_text_files_named_as_splits_are_splits(tmp_path: Path, train: str, test: str):
    text(tmp_path, {train: b"abcdefg", test: b"uvwxyz"})
    found = load("text", tmp_path, length=4)
    # The last byte is only a target.
    assert (bytes_of(found.train.inputs), bytes_of(found.test.inputs)) == (b"abcdef", b"uvwxy")
    assert found.train.groups is None and found.test.groups is None


def test_texts_of_owners_with_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    text(
        tmp_path, {"ann_train.txt": b"abcd", "bob-train.txt": b"efgh", "bob-test.txt": b"ijkl", "ann_dev.txt": b"mnop"}
    )
    text(tmp_path, {"ann_test.txt": b"qrst", "notes.txt": b"uvwx"})
    found = load("text", tmp_path, length=3)
    assert found.train.groups is not None and found.test.groups is not None
    assert (bytes_of(found.train.inputs), found.train.groups.tolist()) == (b"abcefg", [0, 1])
    assert (bytes_of(found.test.inputs), found.test.groups.tolist()) == (b"qrsijk", [0, 1])
    for left_out in ("ann_dev.txt", "notes.txt"):
        check_sentence(next(one for one in caplog.messages if left_out in one), ["not read"])


def test_other_names_of_texts_are_owners(tmp_path: Path):
    text(tmp_path, {"stress_test.txt": b"abcdef", "test.txt": b"ghijkl", "ann.txt": b"mnopqr"})
    groups = load("text", tmp_path, length=2).train.groups
    assert groups is not None and set(groups.tolist()) == {0, 1, 2}
    text(tmp_path, {"training.txt": b"stuvwx"})
    (tmp_path / "test.txt").unlink()
    with refused(names=["training.txt", "ann.txt", "split"]):
        load("text", tmp_path)


def test_packed_texts_are_unpacked_within_the_memory_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = b"The quick brown fox. " * 50
    plain, packed = (load("text", text(tmp_path, {name: content}) / name, length=8) for name in ("a.txt", "b.txt.gz"))
    np.testing.assert_array_equal(plain.train.inputs, packed.train.inputs)
    for start in (b"BZh91AY", b"\xfd7zXZ\x00", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"):
        (tmp_path / "c.txt").write_bytes(start + content)
        with refused(names=["c.txt", "gzip"]):
            load("text", tmp_path / "c.txt")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(content)[:30])
    with refused(names=["cut.txt.gz"]):
        load("text", tmp_path / "cut.txt.gz")
    text(tmp_path, {"bomb.txt.gz": bytes(40 << 20)})
    unpacked: list[int] = []
    monkeypatch.setattr(memory, "machine_bytes", lambda: 10**8)
    monkeypatch.setattr(gzip.GzipFile, "read", _counted(gzip.GzipFile.read, unpacked))
    with refused(names=["bomb.txt.gz", "memory"]):
        load("text", tmp_path / "bomb.txt.gz")
    assert sum(unpacked) < 10**7, "not all 40 MiB were unpacked"


# Any: a file's method.
def _counted(read: Any, sizes: list[int]) -> Any:
    """The method `read`, which also notes how much it has read."""

    def counting(self: object, size: int = -1) -> bytes:
        found = read(self, size)
        sizes.append(len(found))
        return found

    return counting


def test_a_notice_about_splits_comes_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    text(tmp_path, {"train.txt": b"abcd", "valid.txt": b"efgh", "test.txt": b"ijkl"})

    def notices() -> Iterator[str]:
        load("text", tmp_path, length=2)
        return (one for one in caplog.messages if "valid.txt" in one)

    assert len([*notices()]) == len([*notices()]) == 1
