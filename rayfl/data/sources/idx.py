"""Reads the IDX files of MNIST and similar datasets: a magic number, big-endian sizes, then bytes (may be gzipped).

Source: the file format section of Yann LeCun's MNIST page (http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import reading, require_regular

MOST_DIMENSIONS = 8
_OF_BYTES = b"\0\0\x08"
"""The first bytes of a file whose values are unsigned bytes."""


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in `path`, read-only; a name that ends in .gz is unpacked. Raise RayflError if there is none.

    At most as many bytes are unpacked as the header announces.
    """
    with reading(path, "fetch it again or give another root", EOFError, zlib.error):
        require_regular(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            dimensions = magic[3] if magic[:3] == _OF_BYTES and len(magic) == 4 else 0
            header = file.read(4 * dimensions)
            if not 0 < dimensions <= MOST_DIMENSIONS or len(header) < 4 * dimensions:
                raise RayflError(
                    f"{path} is not an IDX file of bytes: it begins with {magic.hex(' ')!r}; fetch it again"
                )
            shape = struct.unpack(f">{dimensions}I", header)
            memory.require(math.prod(shape), str(path), "fetch it again")
            content = file.read(math.prod(shape) + 1)
    if len(content) != math.prod(shape):
        found = "more" if len(content) > math.prod(shape) else len(content)
        raise RayflError(f"{path} has {found} bytes of values where its header says {math.prod(shape)}: fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def find_idx(folder: Path, stem: str, advice: str) -> Path:
    """`folder/stem` or `folder/stem.gz`, whichever exists. If neither does, RayflError ends with `advice`."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    raise RayflError(f"{folder} has no {stem} or {stem}.gz: {advice}")
