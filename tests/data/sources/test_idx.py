import gzip
import struct

import numpy as np
import pytest

from rayfl.data.sources.idx import find_idx, read_idx
from rayfl.errors import RayflError

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
    ("content", "sentence"),
    [
        (SIX_BYTES[:-1], "has 17 bytes where its header says 18"),
        (SIX_BYTES + b"\0", "has more bytes where its header says 18"),
        (SIX_BYTES[:10], "cut off within its header"),
        (b"\x89PNG and more", "is not an IDX file: its first bytes are '89 50 4e 47'"),
        (b"", "is not an IDX file"),
        (gzip.compress(SIX_BYTES, mtime=0)[:-4], "cannot be read"),
        (gzip.compress(SIX_BYTES, mtime=0)[:12] + b"\xff" * 20, "cannot be read|is not an IDX file"),
        (gzip.compress(SIX_BYTES + bytes(10**6)), "has more bytes where its header says 18"),
        (SIX_BYTES[:4] + b"\xff" * 8, r"takes 18\.4 EB of memory, and this machine has .*; fetch it again"),
        (bytes([0, 0, 8, 200]) + bytes(800), "is not an IDX file"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, sentence):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(RayflError, match=sentence) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_file_is_found_packed_or_not(tmp_path):
    assert find_idx(tmp_path, "images") is None
    (tmp_path / "images.gz").touch()
    assert find_idx(tmp_path, "images") == tmp_path / "images.gz"
    (tmp_path / "images").touch()
    assert find_idx(tmp_path, "images") == tmp_path / "images"
