"""Keeps decoded arrays on disk as .npy files, which later runs map into memory.

Decoding half a million small images or gigabytes of JSON takes minutes; only the first run of a sweep decodes them.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rayfl.data.datasets import Samples
from rayfl.limits.regular_files import expanded

FORMAT = 1
"""A change of the decoding raises this number, so that arrays of older versions are not used."""
Splits = tuple[Samples, Samples]
"""Train and test samples."""


def cached_arrays(cache: Path, name: str, files: Sequence[Path], read: Callable[[], Splits]) -> Splits:
    """Return what `read` makes of `files`; the arrays are saved below `cache`/arrays and mapped from there.

    Saved arrays are used again if the order, paths, sizes, inodes and times of the files are the same. If `cache`
    cannot be written or is full, the samples stay in memory.
    """
    folder = expanded(cache) / "arrays" / f"{name}-{_digest(name, files)}"
    if not folder.is_dir():
        splits = read()
        if not _save(folder, splits):
            return splits
    return _load(folder, "train"), _load(folder, "test")


def _digest(name: str, files: Sequence[Path]) -> str:
    found = [
        (str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        for path in files
        if (status := path.stat())
    ]
    return hashlib.sha256(json.dumps([FORMAT, name, found]).encode()).hexdigest()[:16]


def _save(folder: Path, splits: Splits) -> bool:
    """Write all arrays, then rename the folder, so that no process reads a partial one; False if writing fails."""
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.partial-"))
        for split, samples in zip(("train", "test"), splits, strict=True):
            for part, values in (("inputs", samples.inputs), ("labels", samples.labels), ("groups", samples.groups)):
                if values is not None:
                    with open(partial / f"{split}-{part}.npy", "wb") as file:
                        np.save(file, values, allow_pickle=False)
                        file.flush()
                        os.fsync(file.fileno())
        os.rename(partial, folder)
    except OSError:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        # Another run may have written the folder first.
        return folder.is_dir()
    return True


def _load(folder: Path, split: str) -> Samples:
    paths = (folder / f"{split}-{part}.npy" for part in ("inputs", "labels", "groups"))
    # Plain arrays, since pickle cannot share the buffer of a memmap.
    inputs, labels, *groups = (np.asarray(np.load(path, mmap_mode="r")) for path in paths if path.exists())
    return Samples(inputs, labels, groups[0] if groups else None)
