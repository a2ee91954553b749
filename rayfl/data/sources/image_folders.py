"""CINIC-10 and Tiny-ImageNet: image files in one folder per class.

All images are decoded at the first load and kept on disk as bytes, 0.3 GB for each 90,000 images of CINIC-10 and 1.4 GB
for Tiny-ImageNet; later loads map them. The workers of a machine share one copy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.fetch import Fetched
from rayfl.data.sources.image_file import read_image
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError
from rayfl.limits import memory

Files = Sequence[tuple[str | Path, int]]
"""Images and their labels."""


class _ImageFolders(Fetched):
    """Colour images of one size; classes are numbered in the order of their folders' names."""

    augment: bool = Field(default=True, description="crop and flip train batches at random")

    num_classes: ClassVar[int]
    side: ClassVar[int]
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]

    def _files(self, folder: Path, classes: Sequence[str]) -> Files:
        """The images in `folder`/CLASS, at any depth. RayflError unless the classes are those given."""
        kind = torchvision().datasets.ImageFolder
        if not folder.is_dir():
            raise self.missing(f"there is no folder {folder}")
        try:
            found = kind(str(folder))
        except FileNotFoundError as error:
            raise self.missing(str(error).partition("\n")[0].rstrip(". ")) from None
        if list(found.classes) != list(classes):
            raise self.missing(
                f"{folder} has the {len(found.classes)} classes {_some(found.classes)} where the train split has the "
                f"{len(classes)} classes {_some(classes)}"
            )
        return found.samples

    def _classes(self, folder: Path) -> list[str]:
        """The names of the class folders, sorted. RayflError if there are none, or too many."""
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if not 1 <= len(classes) <= self.num_classes:
            raise self.missing(f"{folder} has {len(classes)} class folders where {self.num_classes} belong")
        return classes

    def _dataset(self, train: Files, test: Files) -> Dataset:
        paths = [Path(path) for path, _ in (*train, *test)]
        train_samples, test_samples = cached_arrays(
            self.cache, self.name, paths, lambda: (self._samples(train), self._samples(test))
        )
        return Dataset(
            name=self.name,
            train=train_samples,
            test=test_samples,
            num_classes=self.num_classes,
            kind="image",
            mean=self.mean,
            std=self.std,
            augment=self.augment,
        )

    def _samples(self, files: Files) -> Samples:
        memory.require(len(files) * 3 * self.side**2, self.name, "use a machine with more")
        images = np.empty((len(files), 3, self.side, self.side), np.uint8)
        for row, (path, _) in enumerate(files):
            images[row] = self._pixels(Path(path))
        return Samples(images, np.array([label for _, label in files], np.int64))

    def _pixels(self, path: Path) -> np.ndarray:
        """One image, uint8 [3, side, side]; grey ones get three equal channels."""
        pixels = np.asarray(read_image(path, f"fetch {self.name} again"))
        if pixels.shape != (self.side, self.side, 3):
            height, width = pixels.shape[:2]
            raise RayflError(
                f"{self.name}: {path} is {width}x{height} pixels and not {self.side}x{self.side}: {self.advice}"
            )
        return pixels.transpose(2, 0, 1)


class CINIC10(_ImageFolders):
    """Colour images [3, 32, 32] of CIFAR-10's classes, 90,000 to train, validate and test each (Darlow, 2018).

    Darlow, Crowley, Antoniou, Storkey: CINIC-10 is not ImageNet or CIFAR-10 (2018).

    with_validation: train on the images in `valid` too, 180,000 in all, as the authors propose.
    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name: ClassVar[str] = "cinic10"
    with_validation: bool = Field(default=False, description="train on the images in valid too")
    num_classes: ClassVar[int] = 10
    side: ClassVar[int] = 32
    mean: ClassVar[tuple[float, float, float]] = (0.4789, 0.4723, 0.4305)
    std: ClassVar[tuple[float, float, float]] = (0.2421, 0.2383, 0.2587)
    advice: ClassVar[str] = (
        "fetch CINIC-10.tar.gz from https://datashare.ed.ac.uk/handle/10283/3192 and unpack it; the folders train, "
        "valid and test"
    )

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        folder = self.folder()
        classes = self._classes(folder / "train")
        train = [*self._files(folder / "train", classes)]
        if self.with_validation:
            train += self._files(folder / "valid", classes)
        return self._dataset(train, self._files(folder / "test", classes))


class TinyImageNet(_ImageFolders):
    """Colour images [3, 64, 64] of 200 classes, 100,000 to train and 10,000 to test (Stanford CS231N).

    The test split is the official validation split, whose labels are in `val/val_annotations.txt`; the official test
    split has none.

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name: ClassVar[str] = "tiny-imagenet"
    num_classes: ClassVar[int] = 200
    side: ClassVar[int] = 64
    mean: ClassVar[tuple[float, float, float]] = (0.4802, 0.4481, 0.3975)
    std: ClassVar[tuple[float, float, float]] = (0.2770, 0.2691, 0.2821)
    advice: ClassVar[str] = (
        "fetch http://cs231n.stanford.edu/tiny-imagenet-200.zip and unpack it; the folders train and val"
    )

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        folder = self.folder()
        classes = self._classes(folder / "train")
        return self._dataset(self._files(folder / "train", classes), self._annotated(folder / "val", classes))

    def _annotated(self, folder: Path, classes: Sequence[str]) -> Files:
        """The validation images in the order of the annotations: file, class and a box a line, between tabs."""
        path = folder / "val_annotations.txt"
        if not path.is_file():
            raise self.missing(f"there is no {path}")
        label_of = {name: label for label, name in enumerate(classes)}
        files: list[tuple[Path, int]] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            image, _, rest = line.partition("\t")
            label = label_of.get(rest.partition("\t")[0])
            if label is None:
                raise self.missing(f"line {number} of {path} does not name an image and a class of the train split")
            files.append((folder / "images" / image, label))
        return files


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
