"""A user's own image files, in one folder per class."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayfl.data.datasets import Dataset, Field, RayflError, Samples, Source
from rayfl.data.sources.conversion import dataset
from rayfl.data.torchvision import torchvision
from rayfl.limits import memory
from rayfl.limits.folders import files_below, is_folder
from rayfl.limits.regular_files import expanded, reading, require_regular

Files = Sequence[tuple[Path, int]]
"""Images and their labels."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, by Pillow's names, whatever a file is called: Pillow has PostScript run by Ghostscript."""


class OwnImageFolder(Source):
    """Images in one folder per class: PATH/CLASS/*, or PATH/train/CLASS/* and PATH/test/CLASS/*.

    Classes are numbered in the order of their names. Each load reads all images into memory.
    """

    name = "image-folder"
    path: str = Field(
        min_length=1, examples=["my_images"], description="the folder of class folders, or of train and test"
    )
    side: int | None = Field(
        default=None, ge=1, le=8192, description="pixels to which both sides are scaled; default: not scaled"
    )
    channels: Literal[1, 3] = Field(default=3, description="3: colours; 1: grey")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test")
    augment: bool = Field(default=False, description="crop and flip train batches at random")
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
        found = dataset(self.name, self.path, train, test[0] if test else None, self.test_share, kind="image")
        return replace(found, augment=self.augment)

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
        samples = self._decoded(files)
        owners = np.repeat([home.name for home in by_home], [len(found) for found in by_home.values()])
        return replace(samples, groups=owners) if self.owners else samples

    def _decoded(self, files: Files) -> Samples:
        """The images, uint8 [n, channels, height, width]. Raise RayflError if they are too large for the memory, or of
        several sizes."""
        advice = "set data.side to scale all images"
        images = np.empty(0, np.uint8)
        for row, (path, _) in enumerate(files):
            image = self._pixels(path)
            if row == 0:
                memory.require(len(files) * image.nbytes, f"the data of {len(files)} images like {path}", advice)
                images = np.empty((len(files), *image.shape), np.uint8)
            if image.shape != images.shape[1:]:
                given, others = ("x".join(map(str, one.shape[:-3:-1])) for one in (image, images))
                raise RayflError(f"{path} is {given} pixels and not {others}: {advice}")
            images[row] = image
        return Samples(images, np.array([label for _, label in files], np.int64))

    def _pixels(self, path: Path) -> np.ndarray:
        """An image, uint8 [channels, height, width]."""
        image = read_image(path)
        if self.side is not None:
            image = image.resize((self.side, self.side))
        return np.atleast_3d(image if self.channels == 3 else image.convert("L")).transpose(2, 0, 1)


def class_names(folder: Path) -> list[str]:
    """The names of the class folders in `folder`, sorted. Raise RayflError for a link to a folder around it."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in found if not path.name.startswith(".") and is_folder(path))


def labelled_files(folder: Path, classes: Sequence[str]) -> Files:
    """The images in `folder`/CLASS, at any depth, in the order of their paths, with the number of their class."""
    endings = torchvision().datasets.folder.IMG_EXTENSIONS
    homes = [(folder / name, label) for label, name in enumerate(classes) if (folder / name).is_dir()]
    return sorted(
        (path, label) for home, label in homes for path in files_below(home) if path.name.lower().endswith(endings)
    )


# Any: a picture of Pillow, which torchvision brings along.
def read_image(path: Path) -> Any:
    """The image in three colours. Raise RayflError if it cannot be decoded, or has more pixels than Pillow allows."""
    from PIL import Image

    # Pillow's decoders raise many types of exceptions for damaged files.
    with reading(path, f"repair or remove it (known are {', '.join(FORMATS)})", Exception):
        require_regular(path)
        # A file of a few kilobytes may announce gigabytes of pixels; of some sizes Pillow only warns.
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path, formats=FORMATS) as image,
        ):
            return image.convert("RGB")
