"""MNIST and Fashion-MNIST: 60,000 train and 10,000 test images of 28x28 grey pixels in 10 classes."""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.idx import find_idx, read_idx
from rayfl.settings import SettingsError
from rayfl.vision import torchvision

FASHION_MNIST_OF_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
STEMS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class _FourFiles(Source):
    """Four IDX files in `root`; where no root is given, downloaded to `cache` by torchvision's class."""

    root: Path | None = Field(default=None, strict=False)
    cache: Path = Field(default=Path("~/.cache/rayfl"), strict=False)

    mean: ClassVar[float]
    std: ClassVar[float]

    def load(self) -> Dataset:
        """The dataset; SettingsError with what to do where files are missing and cannot be fetched."""
        folder = self.root if self.root is not None else self._folder_without_root()
        return Dataset(
            name=self.name,
            train=_samples(folder.expanduser(), "train"),
            test=_samples(folder.expanduser(), "test"),
            num_classes=10,
            kind="image",
            mean=(self.mean,),
            std=(self.std,),
        )

    @abstractmethod
    def _folder_without_root(self) -> Path:
        """Where the files lie, fetched if need be."""

    def _download(self, kind: str, advice: str) -> Path:
        """The folder into which torchvision's class `kind` downloads and unpacks the four files."""
        cache = self.cache.expanduser()
        try:
            getattr(torchvision().datasets, kind)(cache, download=True)
        except (OSError, RuntimeError, ImportError) as error:
            reason = str(error).partition("\n")[0].rstrip(":")
            raise SettingsError(
                f"{self.name} is not on this machine and cannot be downloaded ({reason}): {advice}"
            ) from None
        return cache / kind / "raw"


class MNIST(_FourFiles):
    """Handwritten digits (LeCun, Cortes, Burges 1998)."""

    name: ClassVar[str] = "mnist"
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081

    def _folder_without_root(self) -> Path:
        return self._download("MNIST", "put its four idx files into a folder and set data.root")


class FashionMNIST(_FourFiles):
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017); read from Debian's dataset-fashion-mnist where it is there."""

    name: ClassVar[str] = "fashion-mnist"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530

    def _folder_without_root(self) -> Path:
        if FASHION_MNIST_OF_DEBIAN.is_dir():
            return FASHION_MNIST_OF_DEBIAN
        advice = (
            "run `apt-get install dataset-fashion-mnist`, or put its four idx files into a folder and set data.root"
        )
        return self._download("FashionMNIST", advice)


def _samples(folder: Path, split: str) -> Samples:
    images, labels = (_array(folder, stem) for stem in STEMS[split])
    if images.ndim != 3 or images.shape[:1] != labels.shape:
        raise SettingsError(f"{folder}: {split} has images of shape {images.shape} and labels of shape {labels.shape}")
    return Samples(images[:, None], labels.astype(np.int64))


def _array(folder: Path, stem: str) -> np.ndarray:
    path = find_idx(folder, stem)
    if path is None:
        raise SettingsError(f"{folder} has no {stem} or {stem}.gz: put the four idx files there or set data.root")
    return read_idx(path)
