"""Samples by owner (a writer, a speaking role), from the HDF5 files of TensorFlow Federated.

A file has a group `examples` with one group per client and one array per feature; h5py opens it, which is an optional
dependency: `pip install 'rayfl[tff]'`.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from rayfl.data.datasets import Samples
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.fetch import Fetched, import_optional
from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import reading, require_regular


class OwnerSamples(NamedTuple):
    """The samples of one owner in one split. inputs: [n, ...]; labels: int64 [n]."""

    owner: str
    inputs: np.ndarray
    labels: np.ndarray


class OwnerFiles(Fetched):
    """A dataset in the files STEM_train.h5 and STEM_test.h5 of TensorFlow Federated."""

    stem: ClassVar[str]

    def files(self) -> list[Path]:
        """The files of the train and the test split."""
        return [self.folder / f"{self.stem}_{split}.h5" for split in ("train", "test")]

    @abstractmethod
    def read(self, path: Path) -> Iterable[OwnerSamples]:
        """The samples of each owner in one file. Raise RayflError if they are wrong."""

    def splits(self) -> tuple[Samples, Samples]:
        """Both splits. Raise RayflError if the files are not in the folder, or wrong."""
        files = self.files()
        if not all(path.exists() for path in files):
            raise self.missing(f"{self.folder} has no {files[0].name} and {files[1].name}")
        splits = cached_arrays(self.cache, self.name, files, lambda: joined(self.name, *map(self.read, files)))
        train, test = (replace(samples, place=str(self.folder)) for samples in splits)
        return train, test


def joined(dataset: str, train: Iterable[OwnerSamples], test: Iterable[OwnerSamples]) -> tuple[Samples, Samples]:
    """Both splits; the group of a sample is its owner's place among the sorted names of all owners of either split.

    Raise RayflError if a split has no owners.
    """
    splits = list(train), list(test)
    if not all(splits):
        raise RayflError(f"{dataset}: one of its files has no clients; fetch it again")
    owners = sorted({part.owner for parts in splits for part in parts})
    numbers = {owner: number for number, owner in enumerate(owners)}
    return _samples(splits[0], numbers), _samples(splits[1], numbers)


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
    wanted = ", ".join(f"examples/CLIENT/{feature}" for feature in features)
    with reading(path, f"fetch an HDF5 file with {wanted}", KeyError, AttributeError, TypeError, RuntimeError):
        require_regular(path)
        with h5py.File(path, "r") as file:
            for name, group in sorted(file["examples"].items()):
                arrays = [group[feature] for feature in features]
                # A dataset of HDF5 that is filled with one value takes no room in its file.
                memory.require(sum(array.nbytes for array in arrays), f"client {name!r}", "fetch the file again")
                yield name, [np.asarray(array[()]) for array in arrays]
