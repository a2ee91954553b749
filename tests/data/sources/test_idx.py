import gzip
import struct

import numpy as np
import pytest

from rayfl.data.sources.idx import find_idx, read_idx
from tests.refusals import refused

SIX_BYTES = bytes([0, 0, 0x08, 2]) + struct.pack(">2I", 2, 3) + bytes([1, 2, 3, 4, 5, 255])


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_are_read_in_row_order(tmp_path, packed):
    path = tmp_path / ("six.gz" if packed else "six")
    path.write_bytes(gzip.compress(SIX_BYTES) if packed else SIX_BYTES)
    values = read_idx(path)
    assert (values.dtype, values.tolist()) == (np.uint8, [[1, 2, 3], [4, 5, 255]])


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (SIX_BYTES[:-1], ["5 bytes", "says 6"]),
        (SIX_BYTES + b"\0", ["more bytes", "says 6"]),
        (SIX_BYTES[:10], ["IDX", "00 00 08 02"]),
        (b"\x89PNG and more", ["IDX", "89 50 4e 47"]),
        (b"", ["IDX"]),
        (bytes([0, 0, 0x0B, 1]) + struct.pack(">I2h", 2, 258, -1), ["IDX", "bytes", "00 00 0b 01"]),
        (gzip.compress(SIX_BYTES, mtime=0)[:-4], []),
        (gzip.compress(SIX_BYTES, mtime=0)[:12] + b"\xff" * 20, []),
        (gzip.compress(SIX_BYTES + bytes(10**6)), ["more bytes", "says 6"]),
        (SIX_BYTES[:4] + b"\xff" * 8, ["18.4 EB", "memory"]),
        (bytes([0, 0, 8, 200]) + bytes(800), ["IDX", "00 00 08 c8"]),
    ],
)
def test_damaged_files_are_named(tmp_path, content, names):
    path = tmp_path / ("damaged.gz" if content[:2] == b"\x1f\x8b" else "damaged")
    path.write_bytes(content)
    with refused(names=[path, *names]):
        read_idx(path)


def test_a_file_is_found_packed_or_not(tmp_path):
    with refused(names=[tmp_path, "images", "images.gz", "fetch them"]):
        find_idx(tmp_path, "images", "fetch them")
    (tmp_path / "images.gz").touch()
    assert find_idx(tmp_path, "images", "fetch them") == tmp_path / "images.gz"
    (tmp_path / "images").touch()
    assert find_idx(tmp_path, "images", "fetch them") == tmp_path / "images"
