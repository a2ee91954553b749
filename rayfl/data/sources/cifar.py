"""CIFAR-10 and CIFAR-100 (50,000 train and 10,000 test images, Krizhevsky 2009).

The published files are pickles, so only torchvision opens them, after it has compared their checksums with the
published ones.
"""

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, RayflError
from rayfl.data.sources.fetch import Downloaded
from rayfl.data.torchvision import torchvision


class _CIFAR(Downloaded):
    """The published files, as torchvision's class reads them."""

    augment: bool = Field(default=True, description="crop and flip train batches at random")

    num_classes: ClassVar[int]
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]

    def files(self) -> list[Path]:
        """The folder of the pickles, downloaded if it is missing."""
        kind, advice = self._published()
        return [self.fetch(advice) / kind.base_folder]

    # Any: torchvision's class.
    def _published(self) -> tuple[Any, str]:
        """torchvision's class, and the advice on its files."""
        kind = getattr(torchvision().datasets, self.kind)
        return kind, (
            f"fetch {kind.url}, unpack it as it is and set data.root to the folder that then holds {kind.base_folder}"
        )

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        kind, advice = self._published()
        folder = self.fetch(advice)
        try:
            train, test = (_samples(kind(folder, train=train), folder) for train in (True, False))
        except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, ValueError) as error:
            raise RayflError(
                f"{self.name}: the folder {folder / kind.base_folder} is missing, or its files are not the published "
                f"ones ({error}): {advice}"
            ) from None
        return Dataset(self.name, train, test, self.num_classes, "image", self.mean, self.std, self.augment)


class CIFAR10(_CIFAR):
    """Colour images [3, 32, 32] of 10 classes, 50,000 to train and 10,000 to test (Krizhevsky 2009).

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name = "cifar10"
    kind = "CIFAR10"
    num_classes = 10
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)


class CIFAR100(_CIFAR):
    """Colour images [3, 32, 32] of 100 classes (the fine labels), 50,000 to train and 10,000 to test (Krizhevsky 2009).

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name = "cifar100"
    kind = "CIFAR100"
    num_classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)


# Any: one of torchvision's datasets, with `data` uint8 [n, height, width, channels] and a list of `targets`.
def _samples(images: Any, folder: Path) -> Examples:
    pixels = np.ascontiguousarray(images.data.transpose(0, 3, 1, 2))
    return Examples(pixels, np.array(images.targets, np.int64), place=str(folder))
