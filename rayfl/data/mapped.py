"""Lets other processes map a dataset's files instead of receiving its arrays, on machines that have the same files.

So gigabytes are neither sent to a machine that reads them from shared storage, nor copied into an object store.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Samples

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
"""Number and size of the blocks of a file that are compared, evenly spaced from its first byte to its last."""


@dataclass(frozen=True)
class ArrayFile:
    """An array's .npy file: its path, its size, and a digest of blocks of it."""

    path: Path
    num_bytes: int
    digest: str

    @classmethod
    def of(cls, array: np.ndarray) -> "ArrayFile | None":
        """The file that a whole array is mapped from; None if it is not mapped as a whole."""
        base = array.base
        if not isinstance(base, np.memmap) or base.filename is None:
            return None
        if (base.shape, base.dtype, base.strides) != (array.shape, array.dtype, array.strides):
            return None
        path = Path(base.filename)
        try:
            return cls(path, path.stat().st_size, digest(path))
        except OSError:
            # Mapped, and deleted since: only this process still has it.
            return None

    def open(self) -> np.ndarray | None:
        """Map the array in this process; None if there is no such file or its content is different."""
        try:
            if self.path.stat().st_size != self.num_bytes or digest(self.path) != self.digest:
                return None
            return mapped(self.path)
        except (OSError, ValueError):
            return None


def mapped(path: Path) -> np.ndarray:
    """Map an .npy file as a plain array, since pickle cannot share the buffer of a memmap."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def digest(path: Path) -> str:
    """SHA-256 of blocks of a file, or of the whole file if it is small. Raise OSError if it cannot be read."""
    found, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as file:
        for block in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()


@dataclass(frozen=True)
class MappedDataset:
    """A dataset without the arrays that are mapped from files, and the files by split and part."""

    rest: Dataset
    files: Mapping[tuple[str, str], ArrayFile]

    @classmethod
    def of(cls, dataset: Dataset) -> "MappedDataset":
        """Split a dataset into files and the rest."""
        files: dict[tuple[str, str], ArrayFile] = {}
        rest: dict[str, Samples] = {}
        for split in ("train", "test"):
            samples: Samples = getattr(dataset, split)
            parts = {part: getattr(samples, part) for part in ("inputs", "labels", "groups")}
            found = {part: ArrayFile.of(array) for part, array in parts.items() if array is not None}
            here = {part: file for part, file in found.items() if file is not None}
            files |= {(split, part): file for part, file in here.items()}
            rest[split] = replace(samples, **{part: parts[part][:0].copy() for part in here}) if here else samples
        return cls(replace(dataset, **rest), files)

    def open(self) -> Dataset | None:
        """The dataset with its files mapped; None if a file is missing or different on this machine."""
        parts: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
        for (split, part), file in self.files.items():
            array = file.open()
            if array is None:
                return None
            parts[split][part] = array
        splits = {split: replace(getattr(self.rest, split), **found) for split, found in parts.items() if found}
        return replace(self.rest, **splits)
