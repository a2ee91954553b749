"""Samples by owner (a writer, a speaking role), from the HDF5 files of TensorFlow Federated.

A file has a group `examples` with one group per client and one array per feature; h5py opens it, which is an optional
dependency: `pip install 'rayfl[tff]'`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfl.data.datasets import Samples
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.fetch import Fetched, import_optional
from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular

SPLITS = ("train", "test")


class OwnerSamples(NamedTuple):
    """The samples of one owner in one split. inputs: [n, ...]; labels: int64 [n]."""

    owner: str
    inputs: np.ndarray
    labels: np.ndarray


Read = Callable[[Path], Iterable[OwnerSamples]]
"""Reads one file."""


def read_splits(source: Fetched, stem: str, read: Read) -> tuple[Samples, Samples]:
    """Both splits from STEM_train.h5 and STEM_test.h5. Raise RayflError if they are not in the source's folder."""
    folder, files = source.folder, split_files(source, stem)
    if not all(path.exists() for path in files):
        raise source.missing(f"{folder} has no {files[0].name} and {files[1].name}")
    train, test = cached_arrays(source.cache, source.name, files, lambda: joined(source.name, *map(read, files)))
    return replace(train, place=str(folder)), replace(test, place=str(folder))


def split_files(source: Fetched, stem: str) -> list[Path]:
    """The files of the train and the test split."""
    return [source.folder / f"{stem}_{split}.h5" for split in SPLITS]


def joined(dataset: str, train: Iterable[OwnerSamples], test: Iterable[OwnerSamples]) -> tuple[Samples, Samples]:
    """Both splits; the group of a sample is its owner's place among the sorted names of all owners of either split.

    Raise RayflError if a split has no samples.
    """
    splits = {"train": list(train), "test": list(test)}
    for split, parts in splits.items():
        if not any(len(part.labels) for part in parts):
            raise RayflError(f"{dataset}: its files hold no {split} samples; fetch or make them again")
    owners = sorted({part.owner for parts in splits.values() for part in parts})
    numbers = {owner: number for number, owner in enumerate(owners)}
    return _samples(splits["train"], numbers), _samples(splits["test"], numbers)


def _samples(parts: list[OwnerSamples], numbers: dict[str, int]) -> Samples:
    owners = [numbers[part.owner] for part in parts]
    return Samples(
        inputs=np.concatenate([part.inputs for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        groups=np.repeat(np.array(owners, np.int64), [len(part.labels) for part in parts]),
    )


def read_tff(path: Path, *features: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each client's name and its arrays of the given features, in the order of the names.

    Raise RayflError if h5py is not installed or the file is not one of TensorFlow Federated.
    """
    h5py = import_optional("h5py", "tff", str(path))
    try:
        require_regular(path)
        with h5py.File(path, "r") as file:
            for name, group in sorted(file["examples"].items()):
                arrays = [group[feature] for feature in features]
                # A dataset of HDF5 that is filled with one value takes no room in its file.
                memory.require(sum(array.nbytes for array in arrays), f"client {name!r}", "fetch the file again")
                yield name, [np.asarray(array[()]) for array in arrays]
    except (OSError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        wanted = ", ".join(f"examples/CLIENT/{feature}" for feature in features)
        raise RayflError(f"{path} is not an HDF5 file with {wanted} ({error}): fetch it again") from None
