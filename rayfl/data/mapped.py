"""Data that are mapped from files: other processes, on machines that have the same files, map them too.

So gigabytes need not be sent to a machine that reads them from shared storage, nor be copied into an object store.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Samples

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
"""What of a file is compared: so many blocks of this size, evenly spaced from its first byte to its last."""


@dataclass(frozen=True)
class ArrayFile:
    """An array's .npy file: its path, its size, and a digest of blocks of it."""

    path: Path
    num_bytes: int
    digest: str

    @classmethod
    def of(cls, array: np.ndarray) -> "ArrayFile | None":
        """The file that a whole array is mapped from; None for any other array."""
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
        """The array, mapped here; None where there is no such file, or another one."""
        try:
            if self.path.stat().st_size != self.num_bytes or digest(self.path) != self.digest:
                return None
            return mapped(self.path)
        except (OSError, ValueError):
            return None


def mapped(path: Path) -> np.ndarray:
    """An .npy file as a plain array that is mapped from it, since pickle cannot share a memmap's buffer."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def digest(path: Path) -> str:
    """SHA-256 of blocks of a file: of all of it where it is small. OSError where it cannot be read."""
    found, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as file:
        for block in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()


@dataclass(frozen=True)
class MappedDataset:
    """A dataset without the arrays that are mapped from files, and these files by split and part."""

    rest: Dataset
    files: Mapping[tuple[str, str], ArrayFile]

    @classmethod
    def of(cls, dataset: Dataset) -> "MappedDataset":
        """Take a dataset apart."""
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
        """The dataset, its files mapped; None where one of them is not here, or is another one."""
        parts: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
        for (split, part), file in self.files.items():
            array = file.open()
            if array is None:
                return None
            parts[split][part] = array
        splits = {split: replace(getattr(self.rest, split), **found) for split, found in parts.items() if found}
        return replace(self.rest, **splits)
