"""CIFAR-10 and CIFAR-100: 50,000 train and 10,000 test images of 32x32 colour pixels (Krizhevsky 2009).

Their files are pickles, so only torchvision opens them, after it has compared their checksums with the published ones.
"""

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.fetch import CACHE, Cache, Root, download
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded


class _CIFAR(Source):
    """The published files in `root`; if no root is given, downloaded to `cache` by torchvision's class."""

    root: Root = None
    cache: Cache = CACHE
    augment: bool = Field(default=True, description="crop and flip train batches at random")

    kind: ClassVar[str]
    num_classes: ClassVar[int]
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        kind = getattr(torchvision().datasets, self.kind)
        advice = (
            f"fetch {kind.url}, unpack it as it is and set data.root to the folder that then holds {kind.base_folder}"
        )
        if self.root is None:
            download(self.name, self.kind, self.cache, advice)
        folder = expanded(self.root or self.cache)
        try:
            train, test = (_samples(kind(folder, train=train), folder) for train in (True, False))
        except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, ValueError) as error:
            if not (folder / kind.base_folder).is_dir():
                raise RayflError(f"{self.name}: {folder} has no folder {kind.base_folder}: {advice}") from None
            raise RayflError(
                f"{self.name}: the files in {folder / kind.base_folder} are not the published ones, or not all of "
                f"them ({error}): {advice}"
            ) from None
        return Dataset(self.name, train, test, self.num_classes, "image", self.mean, self.std, self.augment)


class CIFAR10(_CIFAR):
    """Colour images [3, 32, 32] of 10 classes, 50,000 to train and 10,000 to test (Krizhevsky 2009).

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name: ClassVar[str] = "cifar10"
    kind: ClassVar[str] = "CIFAR10"
    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, float, float]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, float, float]] = (0.2470, 0.2435, 0.2616)


class CIFAR100(_CIFAR):
    """Colour images [3, 32, 32] of 100 classes (the fine labels), 50,000 to train and 10,000 to test (Krizhevsky 2009).

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name: ClassVar[str] = "cifar100"
    kind: ClassVar[str] = "CIFAR100"
    num_classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, float, float]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, float, float]] = (0.2673, 0.2564, 0.2762)


# Any: one of torchvision's datasets, with `data` uint8 [n, height, width, channels] and a list of `targets`.
def _samples(images: Any, folder: Path) -> Samples:
    pixels = np.ascontiguousarray(images.data.transpose(0, 3, 1, 2))
    return Samples(pixels, np.array(images.targets, np.int64), place=str(folder))
