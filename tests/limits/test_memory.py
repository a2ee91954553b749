"""What may be asked of this machine's memory."""

import pytest

from rayfl.limits import memory
from tests.refusals import refused


def test_what_fits_passes_and_what_does_not_is_named_with_its_bytes():
    memory.require(memory.machine_bytes(), "the model", "make it smaller")
    with refused(names=["the model", "4.0 YB", "this machine", "make it smaller"]):
        memory.require(4 * 10**24, "the model", "make it smaller")


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (25_300_000_000, "25.3 GB")]
)
def test_bytes_in_words(size: int, words: str):
    assert memory.in_words(size) == words


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("1000\n")
    monkeypatch.setattr(memory, "_CGROUP", (tmp_path / "max", tmp_path / "none"))
    memory.machine_bytes.cache_clear()
    try:
        assert memory.machine_bytes() == 1000
    finally:
        monkeypatch.undo()
        memory.machine_bytes.cache_clear()
