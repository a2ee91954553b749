"""Data that are already divided: an .npz file per client, as PFLlib writes them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.data.sources.conversion import InputKind, dataset
from rayfl.data.sources.pickled_data import read_npz_values
from rayfl.data.sources.table_files import folder_splits
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded, reading
from rayfl.settings import listed

INPUTS = ("x", "X", "inputs", "data", "images", "features")
LABELS = ("y", "Y", "labels", "targets", "label", "target")


class ClientFiles(Source):
    """A folder with an .npz file per client, PATH/train/0.npz and PATH/test/0.npz, or PATH/0.npz: one owner a file.

    Each file has inputs, called x, inputs, data, images or features, and labels, called y, labels or targets: as
    arrays, or in a dictionary (PFLlib's `np.savez(file, data={"x": ..., "y": ...})`), which is read without running
    anything in it. Owners have the order of their numbers, or names. Without test files a share of the examples is
    held out.
    """

    name = "client-files"
    path: str = Field(min_length=1, examples=["PFLlib/dataset/MNIST"], description="the folder of the clients' files")
    kind: InputKind = Field(default="auto", description="image, vector or text; auto: by the type of the inputs")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test split")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a file cannot be read, or has no inputs and labels."""
        folder = expanded(self.path)
        splits = folder_splits(folder, lambda file: file.suffix == ".npz") if folder.is_dir() else {}
        if not splits:
            raise RayflError(
                f"{self.path} is no folder with .npz files; give data.path one such as PFLlib's dataset/MNIST"
            )
        owners = owner_numbers({owner for files in splits.values() for owner, _ in files})
        train, *test = (_joined(files, owners) for files in splits.values())
        held = test[0] if test else None
        return dataset(self.name, self.path, train, held, self.test_share, self.kind, owner_names=[*owners])


def owner_numbers(names: set[str]) -> dict[str, int]:
    """A number for each owner: by the number in the name if each name has one that no other has, else by the name."""
    numbers = {name: re.findall(r"\d+", name) for name in names}
    are_single = {len(digits) for digits in numbers.values()} == {1}
    if are_single and len({int(number) for (number,) in numbers.values()}) == len(names):
        ordered = sorted(names, key=lambda name: int(numbers[name][0]))
    else:
        ordered = sorted(names)
    return {name: place for place, name in enumerate(ordered)}


def _joined(files: Sequence[tuple[str, Path]], owners: Mapping[str, int]) -> Examples:
    """The examples of all files, by the numbers of their owners."""
    parts = sorted((owners[owner], file) for owner, file in files)
    inputs, labels = list[np.ndarray](), list[np.ndarray]()
    for _, file in parts:
        with reading(file, "write it with numpy.savez(file, x=inputs, y=labels)"):
            client_inputs, client_labels = _arrays(file, read_npz_values(file))
        inputs.append(client_inputs)
        labels.append(client_labels)
        if inputs[0].shape[1:] != client_inputs.shape[1:]:
            raise RayflError(
                f"{file} has inputs of shape {list(client_inputs.shape[1:])}, and {parts[0][1]} of "
                f"{list(inputs[0].shape[1:])}; give all one shape"
            )
    groups = np.repeat([owner for owner, _ in parts], [*map(len, labels)])
    return Examples(np.concatenate(inputs), np.concatenate(labels), groups)


# Any: arrays, and the dictionaries in arrays of objects.
def _arrays(file: Path, values: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a client. Raise RayflError if its file does not have both."""
    inner = next((value for value in values.values() if isinstance(value, dict)), values)
    names = [next((name for name in words if name in inner), "") for words in (INPUTS, LABELS)]
    if "" in names:
        raise RayflError(
            f"{file} has {listed([*map(repr, inner)], 'and') or 'nothing'}; it must have inputs, called "
            f"{listed([*INPUTS], 'or')}, and labels, called {listed([*LABELS], 'or')}"
        )
    inputs, labels = (_plain(file, name, inner[name]) for name in names)
    if inputs.shape[:1] != labels.shape[:1]:
        raise RayflError(f"{file} has {len(inputs)} inputs and {len(labels)} labels; give one label for each input")
    return inputs, labels


# Any: what a pickle holds.
def _plain(file: Path, name: str, value: Any) -> np.ndarray:
    try:
        array = np.array(value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype == object or array.ndim == 0:
        raise RayflError(f"{file} has no array of numbers in {name!r}; give all its rows one shape")
    return array
