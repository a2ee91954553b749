"""Which files are opened."""

import os
from pathlib import Path

import pytest

from rayfl.errors import reason
from rayfl.limits.regular_files import expanded, read_bytes, read_text
from tests.refusals import refused


def refusal(path: Path, most: int | None = None) -> str:
    with pytest.raises(OSError) as caught:
        read_bytes(path, most)
    return reason(caught.value)


def test_a_file_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes("\N{BOM}x = 1".encode())
    assert read_text(tmp_path / "a") == "x = 1"


def test_pipes_devices_and_folders_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "it is a pipe, and only regular files are opened"
    assert refusal(Path("/dev/zero")) == "it is a device, and only regular files are opened"
    assert refusal(tmp_path) == "is a directory"


def test_a_link_to_nothing_a_large_file_and_a_null_character_are_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "Gone")
    assert refusal(tmp_path / "link") == f"it is a link to {tmp_path / 'Gone'}, which does not exist"
    assert refusal(tmp_path / "none") == "no such file or directory"
    assert refusal(Path("a\0b")) == "its name holds a null character"
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**12)
    assert refusal(tmp_path / "large").startswith("it has 1.0 TB, which is more than the ")
    assert refusal(tmp_path / "large", 1000) == "it has 1.0 TB, which is more than the 1.0 kB that it may have"


def test_homes_are_put_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert expanded("~/data") == Path("/home/ada/data") and expanded("a/~") == Path("a/~")
    with refused(names=["~nobody-there/x", "home folder", "without ~"]):
        expanded("~nobody-there/x")
