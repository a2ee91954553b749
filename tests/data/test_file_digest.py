"""Digests of data files: by content alone, made again only if a file may have changed."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from rayfl.choices.kinds import make
from rayfl.data import file_digest
from rayfl.data.datasets import Source
from rayfl.data.file_digest import content_digest, source_digests
from tests.refusals import refused


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A minute later than files say."""
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 60)
    return tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose whole content is read."""
    found: list[str] = []
    read = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: (found.append(file.name), read(file, name))[1])
    return found


def test_a_file_has_the_digest_of_its_content(later: Path, reads: list[str]):
    path = later / "a.csv"
    path.write_text("a,label\n1,0\n")
    before, times = content_digest(path), path.stat()
    assert before == hashlib.sha256(b"a,label\n1,0\n").hexdigest()[:12]
    assert content_digest(path) == before and len(reads) == 1
    path.write_text("a,label\n1,1\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_digest(path) != before, "of the same size and modification time"
    path.write_text("a,label\n1,0\n")
    assert content_digest(path.rename(later / "b.csv")) == before


def test_a_file_that_has_just_changed_is_read_again(tmp_path: Path, reads: list[str]):
    (tmp_path / "a.csv").write_text("a")
    assert content_digest(tmp_path / "a.csv") == content_digest(tmp_path / "a.csv") and len(reads) == 2


def test_a_folder_has_the_digest_of_its_names_and_contents(later: Path):
    folder = later / "images"
    for name in ("cat/0.png", "dog/0.png", "dog/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "loop").symlink_to(folder)
    before = content_digest(folder)
    (folder / ".DS_Store").write_text("hidden")
    assert content_digest(folder) == before
    (folder / "dog/1.png").rename(folder / "cat/1.png")
    assert (moved := content_digest(folder)) != before
    (folder / "cat/1.png").write_text("dog/2.png")
    assert content_digest(folder) not in (before, moved)


def test_only_caches_of_tables_do_not_count(later: Path):
    (later / "folder").mkdir()
    for name in ("cache-1.png", "cache-1.arrow", ".hidden"):
        (later / "folder" / name).write_bytes(b"1")
    first = content_digest(later / "folder")
    (later / "folder" / "cache-1.arrow").write_bytes(b"2")
    assert content_digest(later / "folder") == first
    (later / "folder" / "cache-1.png").write_bytes(b"2")
    assert content_digest(later / "folder") != first


def test_more_than_ten_gigabytes_are_sampled_and_say_so(later: Path, reads: list[str]):
    path = later / "large.npy"
    with open(path, "wb") as file:
        file.truncate(file_digest.MOST_BYTES + 1)
    before = content_digest(path)
    assert before.startswith("sample-") and not reads
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert content_digest(path) != before


def idx(*stems: str) -> list[str]:
    return [f"{stem}-{part}-ubyte" for stem in stems for part in ("images-idx3", "labels-idx1")]


@pytest.mark.parametrize(
    ("name", "options", "files"),
    [
        ("table", {"path": "a.csv", "test_path": "more/b.csv"}, ["a.csv", "more/b.csv"]),
        ("arrays", {"path": "mine.npz"}, ["mine.npz"]),
        ("arrays", {"path": "."}, ["inputs.npy", "labels.npy"]),
        ("image-folder", {"path": "photos"}, ["photos"]),
        ("mnist", {"root": "."}, idx("t10k", "train")),
        ("cifar10", {"root": "."}, ["cifar-10-batches-py"]),
        ("cifar100", {"root": "."}, ["cifar-100-python"]),
        ("imdb", {"root": "."}, ["test/neg", "test/pos", "train/neg", "train/pos"]),
        ("femnist", {"root": "."}, ["fed_emnist_test.h5", "fed_emnist_train.h5"]),
        ("shakespeare", {"root": "."}, ["shakespeare_test.h5", "shakespeare_train.h5"]),
        ("fed-cifar100", {"root": "."}, ["fed_cifar100_test.h5", "fed_cifar100_train.h5"]),
        ("digits", {}, []),
        ("synthetic", {}, []),
    ],
)
def test_every_source_has_the_digests_of_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict, files: list[str]
):
    monkeypatch.chdir(tmp_path)
    for file in files:
        path = Path(file) if Path(file).suffix or file.endswith("-ubyte") else Path(file, "inside.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file)
    source = make(Source, {"name": name, **options})
    found = source_digests(source)
    assert sorted(found) == files and len(set(found.values())) == len(files)
    assert source_digests(source.model_copy(update={"digest": found})) == found
    for file in files:
        wrong = source.model_copy(update={"digest": {**found, file: "0f3a5c1b2d4e"}})
        with refused(names=[tmp_path / file, "data.digest", "0f3a5c1b2d4e", found[file]]):
            source_digests(wrong)
