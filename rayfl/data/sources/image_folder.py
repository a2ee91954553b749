"""A user's own images, in one folder per class."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.image_file import read_image
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded


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
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out where there is no test")

    def load(self) -> Dataset:
        """Load the dataset. RayflError if there are no images, or images of several sizes."""
        folder = expanded(self.path)
        if not folder.is_dir():
            raise RayflError(f"there is no folder {self.path}; give data.path a folder of class folders")
        split = (folder / "train").is_dir() and (folder / "test").is_dir()
        classes = _classes(folder / "train" if split else folder)
        train = self._rows(folder / "train" if split else folder, classes)
        test = self._rows(folder / "test", classes) if split else None
        return dataset(self.name, self.path, train, test, self.test_share, kind="image")

    def _rows(self, folder: Path, classes: Sequence[str]) -> Samples:
        if strange := [name for name in _classes(folder) if name not in classes]:
            raise RayflError(f"{folder} has the class {strange[0]!r}, of which there is nothing to train on")
        reader = torchvision().datasets.folder
        files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in reader.IMG_EXTENSIONS
        ]
        if not files:
            raise RayflError(f"{folder} has no images in its class folders; give data.path another folder")
        if self.side is not None:
            scaled = len(files) * self.channels * self.side**2
            memory.require(scaled, f"data.side={self.side} for {len(files)} images", "give a smaller side")
        images: list[np.ndarray] = []
        for path, _ in files:
            pixels = self._pixels(path)
            if not images:
                memory.require(len(files) * pixels.nbytes, f"{folder} with {len(files)} images", "set data.side")
            elif pixels.shape != images[0].shape:
                height, width = pixels.shape[1:]
                first = "x".join(map(str, images[0].shape[:0:-1]))
                raise RayflError(
                    f"{path} is {width}x{height} pixels and others are {first}; set data.side to scale all"
                )
            images.append(pixels)
        return Samples(np.stack(images), np.array([label for _, label in files], np.int64), place=str(folder))

    def _pixels(self, path: Path) -> np.ndarray:
        """One image, uint8 [channels, height, width]."""
        image = read_image(path, "mend or remove it")
        if self.side is not None:
            image = image.resize((self.side, self.side))
        pixels = np.asarray(image if self.channels == 3 else image.convert("L"))
        return np.atleast_3d(pixels).transpose(2, 0, 1)


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
