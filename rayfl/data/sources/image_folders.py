"""Image files in one folder per class: a user's own, and Tiny-ImageNet.

The images of Tiny-ImageNet are decoded at the first load and kept on disk as bytes, 1.4 GB; later loads map them. The
workers of a machine share one copy.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.array_cache import cached_arrays
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.fetch import Fetched
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError, reason
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, require_regular

Files = Sequence[tuple[Path, int]]
"""Images and their labels."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, by Pillow's names, whatever a file is called: Pillow has PostScript run by Ghostscript."""
_NUM_CLASSES, _SIDE = 200, 64
_MEAN, _STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
"""Of Tiny-ImageNet."""
MOST_PIXELS = 80_000_000
"""Pixels of the largest image that is decoded: 240 MB as bytes. A file of a few kilobytes may announce far more."""


class OwnImageFolder(Source):
    """Images in one folder per class: PATH/CLASS/*, or PATH/train/CLASS/* and PATH/test/CLASS/*.

    Classes are numbered in the order of their names. Each load reads all images into memory.
    """

    name: ClassVar[str] = "image-folder"
    path: str = Field(
        min_length=1, examples=["my_images"], description="the folder of class folders, or of train and test"
    )
    side: int | None = Field(default=None, ge=1, description="pixels to which every side is scaled; default: as it is")
    channels: Literal[1, 3] = Field(default=3, description="3: colours; 1: grey")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test")

    owners: Literal["folder"] | None = Field(
        default=None, description="folder: PATH/OWNER/CLASS/*, or PATH/train/OWNER/CLASS/* and PATH/test/..."
    )

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError without images, for images of several sizes, or without an owner."""
        folder = expanded(self.path)
        if not folder.is_dir():
            raise RayflError(f"there is no folder {self.path}; give data.path a folder of class folders")
        splits = [folder / "train", folder / "test"]
        splits = splits if all(split.is_dir() for split in splits) else [folder]
        classes = self._classes(splits[0])
        train, *test = (self._samples(split, classes) for split in splits)
        return dataset(self.name, self.path, train, test[0] if test else None, self.test_share, kind="image")

    def _homes(self, split: Path) -> list[Path]:
        """The folders of class folders: those of the owners, or the split itself."""
        return [split / name for name in class_names(split)] if self.owners else [split]

    def _classes(self, split: Path) -> list[str]:
        return sorted({name for home in self._homes(split) for name in class_names(home)})

    def _samples(self, folder: Path, classes: Sequence[str]) -> Samples:
        if strange := [name for name in self._classes(folder) if name not in classes]:
            raise RayflError(f"{folder} has the class {strange[0]!r}, of which there is nothing to train on")
        by_home = {home: labelled_files(home, classes) for home in self._homes(folder)}
        files = [file for found in by_home.values() for file in found]
        if not files:
            inside = "OWNER/CLASS folders" if self.owners else "class folders"
            raise RayflError(f"{folder} has no images in its {inside}; give data.path another folder")
        if self.side is not None:
            scaled = len(files) * self.channels * self.side**2
            memory.require(scaled, f"data.side={self.side} for {len(files)} images", "give a smaller side")
        samples = decoded(files, self._pixels, None, "set data.side to scale all images")
        owners = np.repeat([home.name for home in by_home], [len(found) for found in by_home.values()])
        return replace(samples, groups=owners) if self.owners else samples

    def _pixels(self, path: Path) -> np.ndarray:
        image = read_image(path, "repair or remove it")
        if self.side is not None:
            image = image.resize((self.side, self.side))
        return np.asarray(image if self.channels == 3 else image.convert("L"))


class TinyImageNet(Fetched):
    """Colour images [3, 64, 64] of 200 classes, 100,000 to train and 10,000 to test (Stanford CS231N).

    The test split is the official validation split, whose labels are in `val/val_annotations.txt`; the official test
    split has none.

    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    name: ClassVar[str] = "tiny-imagenet"
    augment: bool = Field(default=True, description="crop and flip train batches at random")
    advice: ClassVar[str] = (
        "fetch http://cs231n.stanford.edu/tiny-imagenet-200.zip and unpack it; the folders train and val"
    )

    def files(self) -> list[Path]:
        """The folders of the two splits."""
        return [self.folder / "train", self.folder / "val"]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        folder = self.folder / "train"
        classes = class_names(folder)
        if not 1 <= len(classes) <= _NUM_CLASSES:
            raise self.missing(f"{folder} has {len(classes)} class folders of {_NUM_CLASSES}")
        train, test = labelled_files(folder, classes), self._annotated(classes)
        if len({label for _, label in train}) < len(classes):
            raise self.missing(f"{folder} has class folders without images")
        pixels = partial(read_image, advice=f"fetch {self.name} again")

        def read() -> tuple[Samples, Samples]:
            return decoded(train, pixels, _SIDE, self.advice), decoded(test, pixels, _SIDE, self.advice)

        samples = cached_arrays(self.cache, self.name, [path for path, _ in (*train, *test)], read)
        return Dataset(self.name, *samples, _NUM_CLASSES, "image", _MEAN, _STD, self.augment)

    def _annotated(self, classes: Sequence[str]) -> Files:
        """The validation images in the order of the annotations: a line has file, class and box, between tabs."""
        path = self.folder / "val" / "val_annotations.txt"
        if not path.is_file():
            raise self.missing(f"there is no {path}")
        try:
            rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
            return [(path.parent / "images" / image, classes.index(name)) for image, name, *_ in rows]
        except ValueError as error:
            raise self.missing(
                f"a line of {path} does not name an image and a class of the train split: {error}"
            ) from None


def class_names(folder: Path) -> list[str]:
    """The names of the class folders in `folder`, sorted."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in found if path.is_dir() and not path.name.startswith("."))


def labelled_files(folder: Path, classes: Sequence[str]) -> Files:
    """The images in `folder`/CLASS, at any depth, in the order of their paths, with the number of their class."""
    reader, numbers = torchvision().datasets.folder, {name: number for number, name in enumerate(classes)}
    found = reader.make_dataset(str(folder), numbers, reader.IMG_EXTENSIONS, allow_empty=True) if classes else []
    return sorted((Path(path), label) for path, label in found)


def decoded(files: Files, pixels: Callable[[Path], np.ndarray], side: int | None, advice: str) -> Samples:
    """The images, uint8 [n, channels, height, width]. Raise RayflError, which ends with `advice`, if they are too large
    for the memory or of several sizes.

    pixels: reads an image as uint8 [height, width, channels]; side: pixels of each side, by default those of the first
    image.
    """
    images = np.empty(0, np.uint8)
    for row, (path, _) in enumerate(files):
        image = np.atleast_3d(pixels(path)).transpose(2, 0, 1)
        if row == 0:
            memory.require(len(files) * image.nbytes, f"the data of {len(files)} images like {path}", advice)
            shape = image.shape if side is None else (len(image), side, side)
            images = np.empty((len(files), *shape), np.uint8)
        if image.shape != images.shape[1:]:
            given, others = ("x".join(map(str, one.shape[:-3:-1])) for one in (image, images))
            raise RayflError(f"{path} is {given} pixels and not {others}: {advice}")
        images[row] = image
    return Samples(images, np.array([label for _, label in files], np.int64))


# Any: a picture of Pillow, which torchvision brings along.
def read_image(path: Path, advice: str) -> Any:
    """The image in three colours. If it cannot be decoded or is too large, RayflError ends with `advice`."""
    from PIL import Image, UnidentifiedImageError

    try:
        require_regular(path)
        with warnings.catch_warnings(action="ignore"):
            # Pillow warns of large images, and these are refused.
            opened = Image.open(path, formats=FORMATS)
        with opened as image:
            if image.width * image.height <= MOST_PIXELS:
                return image.convert("RGB")
            why = f"it is {image.width}x{image.height} pixels, more than the {MOST_PIXELS:,} that are decoded"
    except MemoryError:
        raise
    except UnidentifiedImageError:
        why = f"it is none of {', '.join(FORMATS)}"
    except OSError as error:
        why = reason(error)
    # Pillow's decoders raise many types of exceptions for damaged files.
    except Exception as error:  # noqa: BLE001
        why = str(error).partition("\n")[0] or type(error).__name__
    raise RayflError(f"{path} cannot be read ({why}); {advice}")
