"""Small files in the formats of the public datasets, written by the tests that read them."""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from rayfl.data.torchvision import torchvision


def numbered(first: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [number, *shape]: arrays filled with first, first + 1, ..."""
    return np.stack([np.full(shape, first + step, np.uint8) for step in range(number)])


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, per_file: int = 2) -> None:
    """CIFAR's pickles in `folder`, whose checksums torchvision's class `kind` takes for the published ones.

    Image i of the train split is filled with i, image i of the test split with 100 + i; in row 0,
    column 5 green is 200 and blue 201. Labels count up from 0 modulo 10.
    """
    found = getattr(torchvision().datasets, kind)
    base = folder / found.base_folder
    base.mkdir(parents=True)
    key = "labels" if kind == "CIFAR10" else "fine_labels"

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (base / name).write_bytes(pickle.dumps(content, protocol=2))
        return [name, hashlib.md5((base / name).read_bytes()).hexdigest()]

    def batch(name: str, first: int) -> list[str]:
        images = numbered(first, per_file, (3, 32, 32))
        images[:, 1, 0, 5], images[:, 2, 0, 5] = 200, 201
        labels = [label % 10 for label in range(first % 100, first % 100 + per_file)]
        return write(name, {"data": images.reshape(per_file, -1), key: labels})

    train = [batch(name, per_file * number) for number, (name, _) in enumerate(found.train_list)]
    test = [batch(name, 100) for name, _ in found.test_list]
    meta = write(found.meta["filename"], {found.meta["key"]: [str(label) for label in range(10)]})
    monkeypatch.setattr(found, "train_list", train)
    monkeypatch.setattr(found, "test_list", test)
    monkeypatch.setattr(found, "meta", {**found.meta, "md5": meta[1]})


def write_image(path: Path, pixels: np.ndarray, image_format: str = "png") -> None:
    """uint8 [height, width, 3] as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(path, pixels, format=image_format)


# Any: what h5py writes.
def write_tff(path: Path, examples: Mapping[str, Mapping[str, Any]]) -> None:
    """One HDF5 file of TensorFlow Federated: the features of each client."""
    h5py = pytest.importorskip("h5py", reason="needs the extra: pip install 'rayfl[tff]'")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples")
        for name, features in examples.items():
            client = group.create_group(name)
            for feature, values in features.items():
                client.create_dataset(feature, data=values)
