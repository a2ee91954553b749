import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.datasets import Examples
from rayfl.data.sources.tff import cached_arrays


class Reader:
    """Counts how often it reads."""

    def __init__(self, groups: bool = True) -> None:
        self.calls = 0
        self.groups = groups

    def __call__(self) -> tuple[Examples, Examples]:
        self.calls += 1
        images = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
        groups = np.array([4, 4, 5]) if self.groups else None
        return Examples(images, np.array([0, 1, 2]), groups), Examples(images[:1], np.array([7]), None)


@pytest.fixture
def files(tmp_path) -> list[Path]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text("first")
    return paths


@pytest.mark.parametrize("groups", [True, False])
def test_the_second_time_is_mapped_and_the_same(tmp_path, files, groups):
    read = Reader(groups)
    for _ in range(2):
        train, test = cached_arrays(tmp_path / "cache", "toy", files, read)
        assert train.inputs.dtype == np.uint8 and train.inputs.ravel().tolist() == list(range(12))
        assert (train.labels.tolist(), test.labels.tolist(), test.groups) == ([0, 1, 2], [7], None)
        assert (None if train.groups is None else train.groups.tolist()) == ([4, 4, 5] if groups else None)
    assert read.calls == 1
    assert type(train.inputs) is np.ndarray and isinstance(train.inputs.base, np.memmap)


def test_mapped_arrays_travel_out_of_band(tmp_path, files):
    cached_arrays(tmp_path / "cache", "toy", files, Reader())
    train, _ = cached_arrays(tmp_path / "cache", "toy", files, Reader())
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(train, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [12, 24, 24]
    assert pickle.loads(content, buffers=buffers).inputs.tolist() == train.inputs.tolist()  # noqa: S301


def test_changed_files_another_order_and_other_names_are_read_anew(tmp_path, files):
    read, cache = Reader(), tmp_path / "cache"
    cached_arrays(cache, "toy", files, read)
    cached_arrays(cache, "toy", files[::-1], read)
    cached_arrays(cache, "toy", files[:1], read)
    cached_arrays(cache, "other", files, read)
    assert read.calls == 4
    files[0].write_text("second")
    cached_arrays(cache, "toy", files, read)
    assert read.calls == 5
    # As long as before, but from another time.
    os.utime(files[0], ns=(1, 1))
    cached_arrays(cache, "toy", files, read)
    assert read.calls == 6


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, files):
    (tmp_path / "cache").write_text("a file, not a folder")
    read = Reader()
    for calls in (1, 2):
        assert cached_arrays(tmp_path / "cache", "toy", files, read)[0].labels.tolist() == [0, 1, 2]
        assert read.calls == calls


def test_nothing_half_written_is_left_or_used(tmp_path, files, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(np, "save", full)
        assert cached_arrays(tmp_path / "cache", "toy", files, Reader())[1].labels.tolist() == [7]
    assert list((tmp_path / "cache" / "arrays").iterdir()) == []
