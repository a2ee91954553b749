"""Recognises the splits of a user's files by the names of folders and files: train, validation and test.

Validation data are the test split if there is no test split. If there is one, they are left out, and a notice says so:
a client's own validation data are a share of its train examples (`splits.validation_ratio`).
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Literal

from rayfl.errors import RayflError, log_once
from rayfl.limits.regular_files import is_folder
from rayfl.settings import listed

FileSplit = Literal["train", "validation", "test"]
_WORDS: Mapping[FileSplit, str] = {
    "train": "train|training",
    "validation": "val|valid|validate|validation|dev|development",
    "test": "test|testing",
}
_AFTER = r"([ _.-]?(set|split|data|images))?([ _.-]?(19|20)\d\d)?"
"""What may follow: train_set, val2017."""


def split_of(name: str) -> FileSplit | None:
    """The split that the name of a folder or file means, in any capitalisation; None if it means none."""
    for split, pattern in _WORDS.items():
        if re.fullmatch(f"({pattern}){_AFTER}", name, re.IGNORECASE):
            return split
    return None


def chosen(folder: Path, candidates: Sequence[tuple[FileSplit, Path]]) -> dict[FileSplit, Path]:
    """The path of the train split, and of the test split if there is one, among all splits that a folder has.

    Raise RayflError without a train split, or if two paths are the same split. A notice names validation data that are
    left out.
    """
    by_split: dict[FileSplit, Path] = {}
    for split, path in candidates:
        if split in by_split:
            raise RayflError(
                f"{folder} has {by_split[split].name} and {path.name}, which both name its {split} split; put them "
                "together, or rename one"
            )
        by_split[split] = path
    if "train" not in by_split:
        names = listed([path.name for _, path in candidates], "and")
        raise RayflError(f"{folder} has {names} and no train split beside it; add a folder or file called train")
    if "validation" in by_split:
        validation = by_split.pop("validation")
        if by_split.setdefault("test", validation) is not validation:
            log_once(
                WARNING,
                f"{validation} is not read, because {by_split['test'].name} is the test split: to use these examples, "
                "put them into the train split; splits.validation_ratio sets a share of it aside",
            )
    return {split: by_split[split] for split in _WORDS if split in by_split}


def split_folders(folder: Path) -> dict[FileSplit, Path] | None:
    """The folders of a folder's train and test data; None if its folders are no splits, but classes or owners.

    Folders called train and test, or train and val, are splits; others beside them are left out with a notice. One
    alone is a class if there are only files in it. Raise RayflError where it is not clear, and as `chosen` does.
    """
    inside = folders(folder)
    splits: list[tuple[FileSplit, Path]] = [
        (split, path) for path in inside if (split := split_of(path.name)) is not None
    ]
    others = [path.name for path in inside if split_of(path.name) is None]
    is_pair = {"train"} < {split for split, _ in splits}
    if not splits or (others and not is_pair and not any(folders(path) for _, path in splits)):
        return None
    if others and not is_pair:
        raise RayflError(
            f"{folder} has the folder {splits[0][1].name}, which is named as a split, beside {others[0]}, which is "
            "none; put all data into folders called train and test, or rename the first"
        )
    if others:
        leave_out(folder, others, splits[0][1])
    return chosen(folder, splits)


def text_stem(file: Path) -> str:
    """The name of a text file without its endings."""
    return re.sub(r"(\.txt)?(\.gz)?$", "", file.name)


def split_files(files: Sequence[Path], stem_of: Callable[[Path], str] = text_stem) -> dict[str, dict[FileSplit, Path]]:
    """The train and test files of each owner: ann_train.txt and ann_test.txt, or train.txt and test.txt of owner "".

    stem_of: a file's name without its endings.
    Empty if the names are no splits: a name with an owner counts only where the owner has a train file and another one.
    Raise RayflError for a train file alone among others, and as `chosen` does.
    """
    by_owner: dict[str, list[tuple[FileSplit, Path]]] = {}
    for file in files:
        stem = stem_of(file)
        parts = None if split_of(stem) else re.fullmatch(r"(.*)[ _.-](.*)", stem)
        owner, last = parts.groups() if parts else ("", stem)
        if (split := split_of(last)) is not None:
            by_owner.setdefault(owner, []).append((split, file))
    paired = {
        owner: owner_files for owner, owner_files in by_owner.items() if {"train"} < {split for split, _ in owner_files}
    }
    used = [file for owner_files in paired.values() for _, file in owner_files]
    others = [file.name for file in files if file not in used]
    alone = [file.name for split, file in by_owner.get("", ()) if split == "train"]
    if not paired and alone and len(files) > len(alone):
        raise RayflError(
            f"{files[0].parent} has {alone[0]}, which is named as a split, beside {min({*others} - {*alone})}, which "
            "is none; add a test split, or rename the first"
        )
    if paired and others:
        leave_out(files[0].parent, others, used[0])
    return {owner: chosen(files[0].parent, owner_files) for owner, owner_files in paired.items()}


def leave_out(folder: Path, others: Sequence[str], split: Path) -> None:
    """Log once that `others` in the folder are not read."""
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    log_once(WARNING, f"{folder / others[0]}{more}: not read, because {split.name} beside it is a split")


def folders(folder: Path) -> list[Path]:
    """The folders in `folder` that are not hidden, nor a Mac's (__MACOSX), in the order of their names.

    Raise RayflError for a link to a folder around it.
    """
    if not folder.is_dir():
        return []
    # Unlike Path.is_dir, an entry knows without a system call that a file is no folder: there may be a million images.
    with os.scandir(folder) as entries:
        subfolders = sorted(
            (entry.name, entry.is_symlink())
            for entry in entries
            if entry.is_dir() and not entry.name.startswith((".", "__MACOSX"))
        )
    return [folder / name for name, is_link in subfolders if not is_link or is_folder(folder / name)]
