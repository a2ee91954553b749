"""The IDX format of MNIST and its kin: a magic number, big-endian sizes, then the values (optionally gzipped).

Source: the file format section of Yann LeCun's MNIST page (http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from rayfl.settings import SettingsError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> np.ndarray:
    """The array in `path`, read-only, in native byte order. SettingsError if it is unreadable, cut off or not IDX."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES:
        raise SettingsError(f"{path} is not an IDX file: its first bytes are {content[:4].hex(' ')!r}; fetch it again")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise SettingsError(f"{path} is cut off within its header: fetch it again")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    dtype = np.dtype(TYPES[content[2]])
    expected = header + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise SettingsError(f"{path} has {len(content)} bytes where its header says {expected}: fetch it again")
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def find_idx(folder: Path, stem: str) -> Path | None:
    """`folder/stem` or `folder/stem.gz`, whichever is there."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise SettingsError(f"{path} cannot be read ({error}): fetch it again or give another root") from None
