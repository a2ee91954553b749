"""Fed-CIFAR100: CIFAR-100 divided among 500 clients, from TensorFlow Federated's files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.check import whole_labels
from rayfl.data.datasets import Dataset
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.cifar import CIFAR100
from rayfl.data.sources.fetch import Fetched
from rayfl.data.sources.per_owner import OwnerSamples, joined
from rayfl.data.sources.tff import read_tff, tff_files
from rayfl.errors import RayflError

NUM_CLASSES = 100
SHAPE = (32, 32, 3)


class FedCIFAR100(Fetched):
    """CIFAR-100 by client: colour images [3, 32, 32] of 100 classes; partition `natural` has 500 clients of 100 images
    (Reddi et al., Adaptive Federated Optimization, ICLR 2021: a Pachinko allocation over the coarse labels).

    `root` holds TFF's fed_cifar100_train.h5 and fed_cifar100_test.h5, which need h5py. The test images belong to 100
    other clients, so no client has test data of its own: models are evaluated on all of them together.
    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    augment: bool = Field(default=True, description="crop and flip train batches at random")

    name: ClassVar[str] = "fed-cifar100"
    advice: ClassVar[str] = (
        "fetch https://storage.googleapis.com/tff-datasets-public/fed_cifar100.tar.bz2 and unpack it"
    )

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        folder = self.folder()
        files = tff_files(folder, "fed_cifar100")
        if not files:
            raise self.missing(f"{folder} has no fed_cifar100_train.h5 and fed_cifar100_test.h5")
        # Clients of both files are numbered from 0, and are not the same.
        parts = [_owners(path, prefix) for path, prefix in zip(files, ("", "test "), strict=True)]
        train, test = cached_arrays(self.cache, self.name, files, lambda: joined(self.name, *parts))
        train, test = (replace(samples, place=str(folder)) for samples in (train, test))
        return Dataset(self.name, train, test, NUM_CLASSES, "image", CIFAR100.mean, CIFAR100.std, self.augment)


def _owners(path: Path, prefix: str) -> Iterator[OwnerSamples]:
    """Each client's images as uint8 [n, 3, 32, 32] and fine labels. RayflError if types or shapes are wrong."""
    for name, (images, labels) in read_tff(path, "image", "label"):
        whole = whole_labels(f"{path}: client {name!r}", "", labels, NUM_CLASSES)
        if images.dtype != np.uint8 or images.shape != (len(whole), *SHAPE):
            raise RayflError(
                f"{path}: the images of client {name!r} are {images.dtype} of shape {list(images.shape)}, and not "
                f"uint8 of shape [{len(whole)}, 32, 32, 3]: fetch it again"
            )
        yield OwnerSamples(prefix + name, np.ascontiguousarray(images.transpose(0, 3, 1, 2)), whole)
