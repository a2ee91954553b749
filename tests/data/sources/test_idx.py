import gzip
import struct

import numpy as np
import pytest

from rayfl.data.sources.idx import find_idx, read_idx
from tests.refusals import refused

SIX_BYTES = bytes([0, 0, 0x08, 2]) + struct.pack(">2I", 2, 3) + bytes([1, 2, 3, 4, 5, 255])


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_are_read_in_row_order(tmp_path, packed):
    path = tmp_path / "six"
    path.write_bytes(gzip.compress(SIX_BYTES) if packed else SIX_BYTES)
    values = read_idx(path)
    assert (values.dtype, values.tolist()) == (np.uint8, [[1, 2, 3], [4, 5, 255]])


def test_wider_types_are_big_endian(tmp_path):
    path = tmp_path / "words"
    path.write_bytes(bytes([0, 0, 0x0B, 1]) + struct.pack(">I2h", 2, 258, -1))
    values = read_idx(path)
    assert (values.dtype.isnative, values.tolist()) == (True, [258, -1])


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (SIX_BYTES[:-1], ["17 bytes", "says 18"]),
        (SIX_BYTES + b"\0", ["more bytes", "says 18"]),
        (SIX_BYTES[:10], ["cut off", "header"]),
        (b"\x89PNG and more", ["IDX", "89 50 4e 47"]),
        (b"", ["IDX file", "first bytes"]),
        (gzip.compress(SIX_BYTES, mtime=0)[:-4], ["cannot be read"]),
        (gzip.compress(SIX_BYTES, mtime=0)[:12] + b"\xff" * 20, ["fetch it again"]),
        (gzip.compress(SIX_BYTES + bytes(10**6)), ["more bytes", "says 18"]),
        (SIX_BYTES[:4] + b"\xff" * 8, ["18.4 EB", "memory"]),
        (bytes([0, 0, 8, 200]) + bytes(800), ["IDX file", "first bytes"]),
    ],
)
def test_damaged_files_are_named(tmp_path, content, names):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with refused(names=["damaged", *names]) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_file_is_found_packed_or_not(tmp_path):
    assert find_idx(tmp_path, "images") is None
    (tmp_path / "images.gz").touch()
    assert find_idx(tmp_path, "images") == tmp_path / "images.gz"
    (tmp_path / "images").touch()
    assert find_idx(tmp_path, "images") == tmp_path / "images"
