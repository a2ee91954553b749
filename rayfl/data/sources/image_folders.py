"""A user's own image files, in one folder per class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, RayflError, Source
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.images import Channels, ImageSide, decoded
from rayfl.data.sources.splits import FileSplit, folders, split_folders, split_of
from rayfl.data.torchvision import torchvision
from rayfl.limits.regular_files import expanded, files_below
from rayfl.settings import listed

Files = Sequence[tuple[Path, int]]
"""Images and their labels."""


class OwnImageFolder(Source):
    """Images in one folder per class: PATH/CLASS/*, or PATH/train/CLASS/* and PATH/test/CLASS/*.

    Splits are found by the names train, training, test, testing, val, valid, validation and dev in any capitalisation;
    validation data are the test split if there is no other. Classes are numbered in the order of their names. Grey
    pixels of 16 bits become 8 by their highest bits; deeper ones are refused. Each load reads all images into memory.
    """

    name = "image-folder"
    path: str = Field(
        min_length=1, examples=["my_images"], description="the folder of class folders, or of train and test"
    )
    side: ImageSide = None
    channels: Channels = 3
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test")
    augment: bool = Field(default=False, description="crop and flip train batches at random")
    owners: Literal["folder"] | None = Field(
        default=None, description="folder: PATH/OWNER/CLASS/*, PATH/train/OWNER/CLASS/* or PATH/OWNER/train/CLASS/*"
    )

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError without images, for images of several sizes, or without an owner."""
        folder = expanded(self.path)
        if not folder.is_dir():
            raise RayflError(f"there is no folder {self.path}; give data.path a folder of class folders")
        homes = self._homes(folder)
        classes = sorted({path.name for home in homes["train"].values() for path in folders(home)})
        train, *test = (self._samples(folder, split, homes[split], classes) for split in homes)
        images = dataset(
            self.name, self.path, train, test[0] if test else None, self.test_share, kind="image", classes=classes
        )
        return replace(images, augment=self.augment)

    def _homes(self, folder: Path) -> dict[FileSplit, dict[str, Path]]:
        """By split and owner, the folders of class folders; without owners the one of the split, under ""."""
        undivided: dict[FileSplit, Path] = {"train": folder}
        splits = split_folders(folder) or undivided
        homes: dict[FileSplit, dict[str, Path]]
        if self.owners is None:
            homes = {split: {"": home} for split, home in splits.items()}
        elif splits is not undivided:
            homes = {split: {home.name: home for home in folders(path)} for split, path in splits.items()}
        else:
            homes = _homes_of_owners(folder)
        for home in (home for of_split in homes.values() for home in of_split.values()):
            _refuse_inner_splits(home)
        return homes

    def _samples(self, folder: Path, split: FileSplit, homes: Mapping[str, Path], classes: Sequence[str]) -> Examples:
        known = {*classes}
        for home in homes.values():
            if strange := [path.name for path in folders(home) if path.name not in known]:
                raise RayflError(f"{home} has the class {strange[0]!r}, of which there is nothing to train on")
        by_owner = {owner: labelled_files(home, classes) for owner, home in homes.items()}
        files = [file for owner_files in by_owner.values() for file in owner_files]
        if len(classes) == 1 and not self.owners:
            _refuse_folder_above(next(iter(homes.values())) / classes[0], files)
        if not files:
            inside = "OWNER/CLASS folders" if self.owners else "class folders"
            raise RayflError(f"{folder} has no images to {split} with in its {inside}; give data.path another folder")
        images = decoded([path for path, _ in files], self.side, self.channels)
        labels = np.array([label for _, label in files], np.int64)
        owners = np.repeat([*by_owner], [len(owner_files) for owner_files in by_owner.values()])
        return Examples(images, labels, owners if self.owners else None)


def _homes_of_owners(folder: Path) -> dict[FileSplit, dict[str, Path]]:
    """By split and owner, the folders of class folders in PATH/OWNER/CLASS, or in PATH/OWNER/SPLIT/CLASS."""
    owners = folders(folder)
    splits = {owner: split_folders(owner) for owner in owners}
    if without := [owner.name for owner in owners if splits[owner] is None]:
        if len(without) == len(owners):
            return {"train": {owner.name: owner for owner in owners}}
        divided = next(owner.name for owner in owners if owner.name not in without)
        raise RayflError(
            f"{folder / divided} has a train split, and {folder / without[0]} has none; give each owner folders called "
            "train and test, or none of them"
        )
    homes: dict[FileSplit, dict[str, Path]] = {"train": {}}
    for owner in owners:
        for split, home in (splits[owner] or {}).items():
            homes.setdefault(split, {})[owner.name] = home
    return homes


def _refuse_inner_splits(home: Path) -> None:
    """Raise RayflError if a folder of class folders, or one of these, has splits, which would be mixed."""
    for path in (home, *folders(home)):
        named = {split_of(inner.name) for inner in folders(path)}
        if "train" in named and named != {"train", None}:
            names = listed([inner.name for inner in folders(path) if split_of(inner.name)], "and")
            raise RayflError(
                f"{path} has {names}, where {'class folders' if path == home else 'images of one class'} are expected: "
                f"if {path.name} is an owner, set data.owners='folder'; else give data.path the folder of the splits, "
                "or put class folders into PATH/train and PATH/test"
            )


def _refuse_folder_above(home: Path, files: Files) -> None:
    """Raise RayflError if the only class has two folders or more and no image beside them: they are the classes."""
    inside = [path.name for path in folders(home)]
    if len(inside) > 1 and all(path.parent != home for path, _ in files):
        raise RayflError(
            f"{home.parent} has one class, {home.name!r}, with images in {listed(inside[:3], 'and')}: if these are the "
            f"classes, give data.path the folder {home}"
        )


def labelled_files(folder: Path, classes: Sequence[str]) -> Files:
    """The images in `folder`/CLASS, at any depth, in the order of their paths, with the number of their class."""
    endings = torchvision().datasets.folder.IMG_EXTENSIONS
    homes = [(folder / name, label) for label, name in enumerate(classes) if (folder / name).is_dir()]
    return sorted(
        (path, label) for home, label in homes for path in files_below(home) if path.name.lower().endswith(endings)
    )
