"""Reads numpy's .npy and .npz files, after comparing their headers with their sizes.

The header of a file of a hundred bytes may announce terabytes, and a small archive may unpack to them.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_MOST_DENSE = 1100
"""No deflated byte unpacks to more bytes (zlib's own figure is 1032)."""
_DAMAGES = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, UnicodeError)
"""The errors that a damaged archive raises; NotImplementedError is a RuntimeError."""


def read_npy(path: Path) -> np.ndarray:
    """The array in a .npy file. Raise OSError if it cannot be opened, ValueError with the reason if it is not valid;
    RayflError if it is larger than this machine's memory."""
    require_regular(path)
    with path.open("rb") as file:
        return _array(file, os.fstat(file.fileno()).st_size, str(path))


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the arrays called `names` that an .npz file has. Errors are those of `read_npy`."""
    require_regular(path)
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = {name: members[name] for name in names if name in members}
            memory.require(sum(info.file_size for info in chosen.values()), str(path), "give less data")
            for name, info in chosen.items():
                if info.file_size > _MOST_DENSE * (info.compress_size + 1):
                    raise ValueError(f"its {info.filename} announces more bytes than it can hold")
                with archive.open(info) as file:
                    found[name] = _array(file, info.file_size, f"{path}: {info.filename}")
    except _DAMAGES as error:
        raise ValueError(f"it is a damaged archive: {str(error).rstrip('.') or type(error).__name__}") from None
    return found


def npz_names(path: Path) -> list[str]:
    """The names of all arrays in an .npz file that `read_npz` could read."""
    with zipfile.ZipFile(path) as archive:
        return [info.filename.removesuffix(".npy") for info in archive.infolist()]


def _array(file: IO[bytes], size: int, place: str) -> np.ndarray:
    """The array that begins where `file`, of `size` bytes, stands."""
    shape, dtype = _header(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, and rayfl reads nothing pickled")
    announced, present = dtype.itemsize * math.prod(shape), size - file.tell()
    if announced > present:
        raise ValueError(
            f"its header announces {memory.in_words(announced)} of shape {list(shape)}, and it has {present} bytes"
        )
    memory.require(announced, place, "give less data")
    file.seek(0)
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OverflowError, MemoryError, EOFError):
        raise ValueError("its header does not fit what follows it") from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    try:
        shape, _, dtype = _READ_HEADER[np.lib.format.read_magic(file)](file)
    except (OSError, RayflError, zipfile.BadZipFile, zlib.error):
        raise
    # A damaged header ends in SyntaxError, TokenError, TypeError, RecursionError and others.
    except Exception:  # noqa: BLE001
        raise ValueError("it has no header of numpy's") from None
    if any(type(side) is not int or not 0 <= side < 2**63 for side in shape):
        raise ValueError(f"its header has the shape {list(shape)!r:.80}")
    return shape, dtype
