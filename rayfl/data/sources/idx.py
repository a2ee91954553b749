"""Reads the IDX format of MNIST and similar datasets: a magic number, big-endian sizes, then values (may be gzipped).

Source: the file format section of Yann LeCun's MNIST page (http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.errors import RayflError, reason
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


MOST_DIMENSIONS = 8
_CHUNK_BYTES = 16 << 20


def read_idx(path: Path) -> np.ndarray:
    """The array in `path`, read-only, in native byte order. RayflError if it is unreadable, cut off or not IDX."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return _values(path, gzip.GzipFile(fileobj=file) if packed else file)
    except (OSError, EOFError, zlib.error) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise RayflError(f"{path} cannot be read ({why}): fetch it again or give another root") from None


def find_idx(folder: Path, stem: str) -> Path | None:
    """`folder/stem` or `folder/stem.gz`, whichever exists; None if neither does."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


# Any: a binary file, or what unpacks one.
def _values(path: Path, file: Any) -> np.ndarray:
    """The array in an open file. At most as many bytes are unpacked as its header announces."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not 0 < magic[3] <= MOST_DIMENSIONS:
        raise RayflError(f"{path} is not an IDX file: its first bytes are {magic.hex(' ')!r}; fetch it again")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise RayflError(f"{path} is cut off within its header: fetch it again")
    shape, dtype = struct.unpack(f">{magic[3]}I", sizes), np.dtype(TYPES[magic[2]])
    expected, header = dtype.itemsize * math.prod(shape), 4 + len(sizes)
    memory.require(expected, str(path), "fetch it again")
    content = bytearray()
    while len(content) <= expected and (piece := file.read(min(_CHUNK_BYTES, expected + 1 - len(content)))):
        content += piece
    if len(content) != expected:
        found = f"{len(content) + header}" if len(content) < expected else "more"
        raise RayflError(f"{path} has {found} bytes where its header says {expected + header}: fetch it again")
    values = np.frombuffer(memoryview(content).toreadonly(), dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
