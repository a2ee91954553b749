"""Samples by owner (a writer, a speaking role), from the JSON files of LEAF or the HDF5 files of TensorFlow Federated.

Caldas et al.: LEAF, a benchmark for federated settings (2018); https://github.com/TalwalkarLab/leaf. A file of
TensorFlow Federated has a group `examples` with one group per client and one array per feature; h5py opens it, which is
an optional dependency: `pip install 'rayfl[tff]'`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rayfl.data.datasets import Samples
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.fetch import Fetched, import_optional
from rayfl.errors import RayflError, reason
from rayfl.limits import memory
from rayfl.limits.json_files import parse_any_depth
from rayfl.limits.regular_files import read_bytes, require_regular

SPLITS = ("train", "test")


class OwnerSamples(NamedTuple):
    """The samples of one owner in one split. inputs: [n, ...]; labels: int64 [n]."""

    owner: str
    inputs: np.ndarray
    labels: np.ndarray


Read = Callable[[Path], Iterable[OwnerSamples]]
"""Reads one file."""


def read_splits(source: Fetched, stem: str, read_tff: Read, read_leaf: Read | None = None) -> tuple[Samples, Samples]:
    """Both splits from the files of LEAF (train/*.json, test/*.json), or else from STEM_train.h5 and STEM_test.h5.

    Raise RayflError if neither are in the source's folder.
    """
    folder = source.folder
    files = split_files(source, stem, read_leaf is not None)
    if not all(path.exists() for paths in files for path in paths):
        leaf = "" if read_leaf is None else ", and no train/*.json and test/*.json"
        raise source.missing(f"{folder} has no {stem}_train.h5 and {stem}_test.h5{leaf}")
    read = read_leaf if read_leaf is not None and files[0][0].suffix == ".json" else read_tff
    parts = [chain.from_iterable(map(read, paths)) for paths in files]
    train, test = cached_arrays(source.cache, source.name, [*files[0], *files[1]], lambda: joined(source.name, *parts))
    return replace(train, place=str(folder)), replace(test, place=str(folder))


def split_files(source: Fetched, stem: str, leaf: bool) -> list[list[Path]]:
    """The files of the train and the test split: LEAF's if `leaf` and both splits have some, or else those of TFF."""
    found = [sorted((source.folder / split).glob("*.json")) for split in SPLITS]
    return found if leaf and all(found) else [[source.folder / f"{stem}_{split}.h5"] for split in SPLITS]


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


# Any: x and y are whatever JSON has.
def read_leaf(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user's name, x and y, lists of the same length, in a JSON file of LEAF.

    Raise RayflError if the file is not LEAF's or lacks samples that it announces.
    """
    try:
        content = parse_any_depth(read_bytes(path))
    except OSError as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}): fetch or make it again") from None
    except RayflError as error:
        raise _no_leaf(path, error) from None
    try:
        for name, announced in zip(content["users"], content["num_samples"], strict=True):
            x, y = content["user_data"][name]["x"], content["user_data"][name]["y"]
            if not len(x) == len(y) == announced:
                raise RayflError(
                    f"{path}: user {name!r} has {len(x)} x and {len(y)} y where num_samples says {announced}: fetch or "
                    "make the file again"
                )
            yield name, x, y
    except RayflError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _no_leaf(path, error) from None


def _no_leaf(path: Path, why: Exception) -> RayflError:
    return RayflError(
        f"{path} is not a JSON file of LEAF with users, num_samples and user_data ({why}): fetch or make it again"
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
