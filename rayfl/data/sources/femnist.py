"""Federated EMNIST: the digits and letters of NIST's Special Database 19, each with the person who wrote it."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfl.data.check import first_row, whole_labels
from rayfl.data.datasets import Dataset, moments
from rayfl.data.sources.by_owner import OwnerSamples, read_splits, read_tff, split_files
from rayfl.data.sources.fetch import Fetched
from rayfl.errors import RayflError

SIDE = 28
NUM_CLASSES = 62


class FederatedEMNIST(Fetched):
    """Handwritten digits and letters by writer: images [1, 28, 28] of 62 classes; partition `natural` (TFF).

    Caldas et al., LEAF (2018); about 3,400 writers, 0.7 million images, 0.6 GB as bytes. `root` holds TFF's
    fed_emnist_train.h5 and fed_emnist_test.h5, which need h5py. Each writer's train and test images are those of the
    files. Grey values are rounded to 1/255; paper is white, 255, as in the files. Labels:
    digits 0 to 9, capitals 10 to 35, small letters 36 to 61.
    """

    name: ClassVar[str] = "femnist"
    advice: ClassVar[str] = "fetch https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2 and unpack it"

    def files(self) -> list[Path]:
        """The files of both splits."""
        return split_files(self, "fed_emnist")

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = read_splits(self, "fed_emnist", _tff)
        mean, std = moments(train.inputs)
        return Dataset(self.name, train, test, NUM_CLASSES, "image", mean, std)


def _tff(path: Path) -> Iterator[OwnerSamples]:
    for name, (pixels, labels) in read_tff(path, "pixels", "label"):
        yield _written(path, name, pixels, labels)


def _written(place: Path, writer: str, pixels: np.ndarray, labels: np.ndarray) -> OwnerSamples:
    """pixels: [n, 28, 28] or [n, 784] from 0 to 1; labels: [n] from 0 to 61. Raise RayflError if they are not."""
    num_images = len(labels)
    whole = whole_labels(f"{place}: writer {writer!r}", "", labels, NUM_CLASSES)
    if pixels.size != num_images * SIDE * SIDE:
        raise RayflError(f"{place}: the images of writer {writer!r} have shape {pixels.shape}, not [n, 28, 28]")
    row = first_row(pixels, lambda part: ~((part >= 0) & (part <= 1)))
    if row is not None:
        raise RayflError(
            f"{place}: writer {writer!r} has grey values outside [0, 1] in row {row}, counted from 0; make it again"
        )
    images = np.rint(pixels * 255).astype(np.uint8).reshape(num_images, 1, SIDE, SIDE)
    return OwnerSamples(writer, images, whole)
