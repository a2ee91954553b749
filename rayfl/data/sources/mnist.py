"""MNIST and Fashion-MNIST: grey images of 28x28 pixels in IDX files."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples
from rayfl.data.sources.fetch import Downloaded
from rayfl.data.sources.idx import find_idx, read_idx

FASHION_MNIST_OF_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


class _FourFiles(Downloaded):
    """60,000 train and 10,000 test images of 10 classes in four IDX files."""

    padding: int = Field(default=0, ge=0, le=98, description="black pixels around an image; 2 makes it 32x32")

    mean: ClassVar[float]
    std: ClassVar[float]
    advice: ClassVar[str] = "put its four idx files into a folder and set data.root"

    def files(self) -> list[Path]:
        """The four files, downloaded if they are missing."""
        folder = self.fetch(self.advice, self.kind, "raw")
        parts = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return [find_idx(folder, f"{half}-{part}", self.advice) for half in ("train", "t10k") for part in parts]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        frame = ((0, 0), (0, 0), (self.padding, self.padding), (self.padding, self.padding))
        files = self.files()
        bare = read_samples(*files[:2]), read_samples(*files[2:])
        train, test = (replace(samples, inputs=np.pad(samples.inputs, frame)) for samples in bare)
        return Dataset(self.name, train, test, 10, "image", (self.mean,), (self.std,))


class MNIST(_FourFiles):
    """Handwritten digits (LeCun, Cortes, Burges 1998)."""

    name = "mnist"
    mean = 0.1307
    std = 0.3081
    kind = "MNIST"


class FashionMNIST(_FourFiles):
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017); read from Debian's dataset-fashion-mnist if installed."""

    name = "fashion-mnist"
    mean = 0.2860
    std = 0.3530
    kind = "FashionMNIST"
    advice = f"run `apt-get install dataset-fashion-mnist`, or {_FourFiles.advice}"

    def fetch(self, advice: str, *inside: str, **options: object) -> Path:
        """The folder of the files: that of Debian's package if no root is given and the package is installed."""
        installed = self.root is None and FASHION_MNIST_OF_DEBIAN.is_dir()
        return FASHION_MNIST_OF_DEBIAN if installed else super().fetch(advice, *inside, **options)


def read_samples(images_path: Path, labels_path: Path) -> Samples:
    """Images uint8 [n, 1, height, width] and their labels from two IDX files. Raise RayflError if one is wrong."""
    return Samples(read_idx(images_path)[:, None], read_idx(labels_path).astype(np.int64), place=str(labels_path))
