"""Joins the samples of each owner (a writer, a speaking role) into splits that name the owner of each sample."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfl.data.datasets import Samples
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.fetch import Fetched
from rayfl.data.sources.leaf import has_leaf, leaf_files
from rayfl.data.sources.tff import tff_files
from rayfl.errors import RayflError


class OwnerSamples(NamedTuple):
    """The samples of one owner in one split. inputs: [n, ...]; labels: int64 [n]."""

    owner: str
    inputs: np.ndarray
    labels: np.ndarray


Read = Callable[[Path], Iterable[OwnerSamples]]


def read_splits(source: Fetched, stem: str, read_leaf: Read, read_tff: Read) -> tuple[Samples, Samples]:
    """Both splits from the files of LEAF, or else from STEM_train.h5 and STEM_test.h5 of TensorFlow Federated.

    RayflError if neither are in the source's folder.
    """
    folder = source.folder()
    if has_leaf(folder):
        files = leaf_files(folder)
        parts = [read_leaf(folder / split) for split in ("train", "test")]
    elif files := tff_files(folder, stem):
        parts = [read_tff(path) for path in files]
    else:
        raise source.missing(f"{folder} has neither train/*.json and test/*.json nor {stem}_*.h5")
    train, test = cached_arrays(source.cache, source.name, files, lambda: joined(source.name, *parts))
    return replace(train, place=str(folder)), replace(test, place=str(folder))


def joined(dataset: str, train: Iterable[OwnerSamples], test: Iterable[OwnerSamples]) -> tuple[Samples, Samples]:
    """Both splits; the group of a sample is its owner's place among the sorted names of all owners of either split.

    RayflError if a split has no samples.
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
