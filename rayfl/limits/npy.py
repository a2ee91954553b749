"""Reads numpy's .npy and .npz files. Nothing pickled is read, and no more memory is taken than a file has bytes.

The header of a file of a hundred bytes may announce terabytes, and a small archive may unpack to them.
"""

import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular


def read_npy(path: Path) -> np.ndarray:
    """The array in a .npy file. Raise OSError if it cannot be opened, or is larger than this machine's memory;
    ValueError with the reason if it is not valid."""
    require_regular(path)
    with _refusing():
        # A map is never larger than its file.
        return np.array(np.lib.format.open_memmap(path, mode="r"))


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the arrays called `names`, with *, that an .npz file has. Errors are those of `read_npy`; RayflError if
    they are larger than this machine's memory."""
    require_regular(path)
    arrays = {}
    with _refusing(), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        chosen = {name: info for name, info in members.items() if any(fnmatchcase(name, pattern) for pattern in names)}
        memory.require(sum(info.file_size for info in chosen.values()), str(path), "give less data")
        for name, info in chosen.items():
            with archive.open(info) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn the errors of numpy and zipfile into a ValueError in rayfl's words."""
    try:
        yield
    except (RayflError, PermissionError):
        raise
    # A damaged file ends in SyntaxError, TypeError, RecursionError, MemoryError, BadZipFile and others.
    except Exception as error:  # noqa: BLE001
        objects = re.search("object", str(error), re.IGNORECASE) is not None
        raise ValueError(
            "it is damaged, or no array of numpy's, or holds Python objects, and rayfl reads nothing pickled"
            + (": save numbers, or texts as labels.astype(str)" if objects else "")
        ) from None
