"""Which files are opened."""

import errno
import os
from pathlib import Path

import pytest

from rayfl.errors import reason
from rayfl.limits.regular_files import expanded, read_bytes, read_text
from tests.refusals import check_sentence, refused


def refusal(path: Path, most: int | None = None) -> str:
    with pytest.raises(OSError) as caught:
        read_bytes(path, most)
    return reason(caught.value)


def test_a_file_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes("\N{BOM}x = 1".encode())
    assert read_text(tmp_path / "a") == "x = 1"


def test_pipes_devices_and_folders_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_sentence(refusal(tmp_path / "pipe"), ["pipe", "regular files"])
    check_sentence(refusal(Path("/dev/zero")), ["device", "regular files"])
    assert refusal(tmp_path) == os.strerror(errno.EISDIR).lower()


def test_a_link_to_nothing_a_large_file_and_a_null_character_are_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "Gone")
    check_sentence(refusal(tmp_path / "link"), ["link", tmp_path / "Gone"])
    assert refusal(tmp_path / "none") == os.strerror(errno.ENOENT).lower()
    check_sentence(refusal(Path("a\0b")), ["name", "null character"])
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**12)
    check_sentence(refusal(tmp_path / "large"), ["1.0 TB", "this machine"])
    check_sentence(refusal(tmp_path / "large", 1000), ["1.0 TB", "1.0 kB"])


def test_homes_are_put_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert expanded("~/data") == Path("/home/ada/data") and expanded("a/~") == Path("a/~")
    with refused(names=["~nobody-there/x", "home folder", "without ~"]):
        expanded("~nobody-there/x")
