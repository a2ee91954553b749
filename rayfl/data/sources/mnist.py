"""MNIST and Fashion-MNIST: 60,000 train and 10,000 test images of 28x28 grey pixels in 10 classes."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.check import whole_labels
from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.fetch import CACHE, Cache, Root, download
from rayfl.data.sources.idx import find_idx, read_idx
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded

FASHION_MNIST_OF_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
STEMS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class _FourFiles(Source):
    """Four IDX files in `root`; if no root is given, downloaded to `cache` by torchvision's class."""

    root: Root = None
    cache: Cache = CACHE
    padding: int = Field(default=0, ge=0, le=98, description="black pixels around an image; 2 makes it 32x32")

    mean: ClassVar[float]
    std: ClassVar[float]
    kind: ClassVar[str]
    """The name of torchvision's class."""
    advice: ClassVar[str] = "put its four idx files into a folder and set data.root"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        folder = expanded(self.root) if self.root is not None else self._fetched()
        return Dataset(
            name=self.name,
            train=self._framed(read_samples(folder, *STEMS["train"])),
            test=self._framed(read_samples(folder, *STEMS["test"])),
            num_classes=10,
            kind="image",
            mean=(self.mean,),
            std=(self.std,),
        )

    def _framed(self, samples: Samples) -> Samples:
        if not self.padding:
            return samples
        frame = (self.padding, self.padding)
        return replace(samples, inputs=np.pad(samples.inputs, ((0, 0), (0, 0), frame, frame)))

    def _fetched(self) -> Path:
        """The folder into which torchvision's class downloads and unpacks the four files."""
        download(self.name, self.kind, self.cache, self.advice)
        return expanded(self.cache) / self.kind / "raw"


class MNIST(_FourFiles):
    """Handwritten digits (LeCun, Cortes, Burges 1998)."""

    name: ClassVar[str] = "mnist"
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081
    kind: ClassVar[str] = "MNIST"


class FashionMNIST(_FourFiles):
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017); read from Debian's dataset-fashion-mnist if installed."""

    name: ClassVar[str] = "fashion-mnist"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530
    kind: ClassVar[str] = "FashionMNIST"
    advice: ClassVar[str] = f"run `apt-get install dataset-fashion-mnist`, or {_FourFiles.advice}"

    def _fetched(self) -> Path:
        return FASHION_MNIST_OF_DEBIAN if FASHION_MNIST_OF_DEBIAN.is_dir() else super()._fetched()


def read_samples(folder: Path, images_stem: str, labels_stem: str) -> Samples:
    """Images uint8 [n, 1, height, width] and their labels from two IDX files. RayflError if one is missing or wrong."""
    (images_path, images), (labels_path, labels) = _array(folder, images_stem), _array(folder, labels_stem)
    if images.dtype != np.uint8:
        raise RayflError(f"{images_path} has values of type {images.dtype}, and images are bytes; fetch it again")
    if images.ndim != 3 or images.shape[:1] != labels.shape:
        raise RayflError(
            f"{folder}: {images_stem} has images of shape {images.shape} and labels of shape {labels.shape}; fetch it "
            f"again"
        )
    return Samples(images[:, None], whole_labels(str(labels_path), "", labels), place=str(labels_path))


def _array(folder: Path, stem: str) -> tuple[Path, np.ndarray]:
    path = find_idx(folder, stem)
    if path is None:
        raise RayflError(f"{folder} has no {stem} or {stem}.gz: put the four idx files there or set data.root")
    return path, read_idx(path)
