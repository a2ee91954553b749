"""Federated EMNIST: the digits and letters of NIST's Special Database 19, each with the person who wrote it."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rayfl.data.check import first_row, whole_labels
from rayfl.data.datasets import Dataset, moments
from rayfl.data.sources.by_owner import OwnerFiles, OwnerSamples, read_tff
from rayfl.errors import RayflError

SIDE = 28
NUM_CLASSES = 62


class FederatedEMNIST(OwnerFiles):
    """Handwritten digits and letters by writer: images [1, 28, 28] of 62 classes; partition `natural` (TFF).

    Caldas et al., LEAF (2018); about 3,400 writers, 0.7 million images, 0.6 GB as bytes. `root` holds TFF's
    fed_emnist_train.h5 and fed_emnist_test.h5, which need h5py. Each writer's train and test images are those of the
    files. Grey values are rounded to 1/255; paper is white, 255, as in the files. Labels:
    digits 0 to 9, capitals 10 to 35, small letters 36 to 61.
    """

    name = "femnist"
    stem = "fed_emnist"
    advice = "fetch https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2 and unpack it"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = self.splits()
        mean, std = moments(train.inputs)
        return Dataset(self.name, train, test, NUM_CLASSES, "image", mean, std)

    def read(self, path: Path) -> Iterator[OwnerSamples]:
        """Each writer's images, from pixels [n, 28, 28] or [n, 784] from 0 to 1. Raise RayflError if they are not."""
        for writer, (pixels, labels) in read_tff(path, "pixels", "label"):
            place, shape = f"{path}: writer {writer!r}", (len(labels), 1, SIDE, SIDE)
            whole = whole_labels(place, "", labels, NUM_CLASSES)
            if pixels.size != math.prod(shape):
                raise RayflError(f"{place} has images of shape {pixels.shape}, not [n, 28, 28]")
            if (row := first_row(pixels, lambda part: ~((part >= 0) & (part <= 1)))) is not None:
                raise RayflError(f"{place} has grey values outside [0, 1] in row {row}, counted from 0; make it again")
            yield OwnerSamples(writer, np.rint(pixels * 255).astype(np.uint8).reshape(shape), whole)
