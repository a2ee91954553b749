"""Walks through users' folders, whose links may lead in a circle or far above them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.limits.regular_files import reading


def is_folder(path: Path, around: Sequence[Path] = ()) -> bool:
    """Whether `path` is a folder, or a link to one. Raise RayflError for a link to a folder around it.

    Those are the folders that contain it, and `around`, those through which it was reached, without links.
    """
    if path.is_symlink() and path.is_dir():
        real = Path(os.path.realpath(path))
        if any(one.is_relative_to(real) for one in (Path(os.path.realpath(path.parent)), *around)):
            raise RayflError(f"{path} is a link to {real}, a folder around it, so its files have no end: remove it")
    return path.is_dir()


def files_below(folder: Path, lenient: bool = False, around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files in `folder` at any depth, links followed: those of each folder before those of its folders, by name.

    Raise RayflError as `is_folder` does, and for a folder that cannot be read. `lenient`: these are left out, and so is
    what is hidden. `around`: as of `is_folder`.
    """
    inside: list[Path] = []
    with suppress(RayflError) if lenient else nullcontext(), reading(folder, "repair or remove it"):
        is_folder(folder, around)
        inside = sorted(path for path in folder.iterdir() if not (lenient and path.name.startswith(".")))
    folders = [path for path in inside if path.is_dir()]
    yield from sorted({*inside} - {*folders})
    for path in folders:
        yield from files_below(path, lenient, (*around, Path(os.path.realpath(folder))))
