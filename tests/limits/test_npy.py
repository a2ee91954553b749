"""numpy's files: those that are none, those that lie about their size."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rayfl.limits.npy import read_npy, read_npz
from tests.refusals import refused


def with_header(header: str, content: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3), np.array(3), np.array(["a", "bc"]), np.asfortranarray(np.eye(3)), np.ones(0)],
)
def test_arrays_come_back(tmp_path: Path, array: np.ndarray):
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", inputs=array, other=np.ones(2))
    for found in (read_npy(tmp_path / "a.npy"), read_npz(tmp_path / "a.npz", ["inputs", "labels"])["inputs"]):
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00\xff",
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (3,"),
        with_header("{'descr': '<f8', 'shape': (1,)}"),
        with_header("(" * 90),
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000), }", b"12345678"),
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"),
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9223372036854775807, 9), }"),
        with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"1234"),
        npy(np.arange(4.0))[:-1],
    ],
)
def test_what_is_no_array_is_refused_alone_and_in_an_archive(tmp_path: Path, content: bytes):
    (tmp_path / "a.npy").write_bytes(content)
    with refused(names=["damaged", "no array", "pickled"], error=ValueError):
        read_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("inputs.npy", content)
    with refused(names=["damaged", "no array", "pickled"], error=ValueError):
        read_npz(tmp_path / "a.npz", ["inputs"])


def test_damaged_and_lying_archives_are_refused(tmp_path: Path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, inputs=np.arange(1000.0))
    whole = path.read_bytes()
    for content in (whole[:100], b"PK\x03\x04", whole.replace(b"inputs.npy", b"\xff" * 10, 1), whole[:60] + whole[61:]):
        path.write_bytes(content)
        with refused(names=["damaged"], error=ValueError):
            read_npz(path, ["inputs"])
    # The directory at the end says how large the array is: 8128 bytes become 3 GB.
    path.write_bytes(whole.replace(struct.pack("<I", 8128), struct.pack("<I", 3_000_000_000)))
    assert read_npz(path, ["inputs"])["inputs"].tolist() == list(range(1000))
    path.write_bytes(whole.replace(b"\x08\x00", b"\x63\x00"))
    with refused(names=["damaged"], error=ValueError):
        read_npz(path, ["inputs"])
