"""Which files are a run's own: those that its parts declare. rayfl removes and copies no other, and follows no link."""

import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from os import stat_result
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.run_directory import checkpoint_folders, description, disk, outputs, record, saved_models
from rayfl.run_directory.trackers import tracker

PARTS = (
    description.PART,
    record.PART,
    saved_models.PART,
    checkpoint_folders.PART,
    description.INPUT_FILES,
    tracker.PART,
    outputs.PART,
    description.NOTES_FILE,
    disk.PART,
)
"""The files of every part of a run, in the order of the documentation."""
_OWN = [[re.compile(name) for name in pattern.split("/")] for part in PARTS for pattern in part.patterns]
"""Every pattern, as the expressions for the names in its path."""


def _declared(names: Sequence[str]) -> list[list[re.Pattern[str]]]:
    """The declared paths that begin with these names, or that are a beginning of them."""
    return [
        declared for declared in _OWN if all(name.fullmatch(part) for name, part in zip(declared, names, strict=False))
    ]


def _is_file(names: Sequence[str]) -> bool:
    """Whether a run may write a file whose path has these names, or the temporary file from which it is renamed."""
    names = (*names[:-1], names[-1].removesuffix(".partial"))
    return any(
        len(names) == len(declared) or (len(names) > len(declared) and declared[-1].pattern == ".+")
        for declared in _declared(names)
    )


def _is_folder(names: Sequence[str]) -> bool:
    """Whether a run may make a folder whose path has these names."""
    return any(len(names) < len(declared) or declared[-1].pattern == ".+" for declared in _declared(names))


def is_own_file(name: str) -> bool:
    """Whether a run may have written a file with this path in its directory and needs it later."""
    names = name.split("/")
    return name != disk.LOCK and ".partial" not in name and ".." not in names and _is_file(names)


def own_files(directory: Path) -> Iterator[str]:
    """The paths of the files in a run directory for which `is_own_file` holds; none if there is no directory."""
    if directory.is_dir():
        for path, status in _entries(directory):
            name = path.relative_to(directory).as_posix()
            if stat.S_ISREG(status.st_mode) and is_own_file(name):
                yield name


def require_own_entries(directory: Path) -> None:
    """Raise RayflError if `directory` holds, at any depth, something that no run wrote; the message names it."""
    foreign: list[Path] = []
    for path, status in _entries(directory):
        if stat.S_ISLNK(status.st_mode):
            raise RayflError(f"{path} is a link, which no run made: move it away, or name another directory")
        names = path.relative_to(directory).parts
        # A directory in the place of a file is damage; nothing is lost with it if it is empty.
        folder = stat.S_ISDIR(status.st_mode) and (_is_folder(names) or _is_file(names))
        if not (folder or (stat.S_ISREG(status.st_mode) and _is_file(names))):
            foreign.append(path)
    if foreign:
        first = next((path for path in foreign if not path.is_dir()), foreign[0])
        raise RayflError(f"{first} is not a file of a run: move it away, or name another directory")


def require_no_links(directory: Path) -> None:
    """Raise RayflError for a link in a run directory, through which a run would write to another place."""
    for path, status in _entries(directory):
        if stat.S_ISLNK(status.st_mode):
            raise RayflError(
                f"{path} is a link, and a run writes only into its own directory: move what it leads to into its place"
            )


def _entries(directory: Path) -> Iterator[tuple[Path, stat_result]]:
    """Everything in a directory and below, outermost first; links are not followed."""
    for entry in sorted(directory.iterdir()):
        # A run that is still going may have removed it since.
        with suppress(FileNotFoundError):
            status = entry.lstat()
            yield entry, status
            if stat.S_ISDIR(status.st_mode):
                yield from _entries(entry)


def remove_entries(directory: Path) -> None:
    """Remove everything in a run directory except its lock.

    experiment.json is removed last, so the directory still counts as a run if the removal is interrupted.
    """
    removed = [entry for entry in directory.iterdir() if entry.name != disk.LOCK]
    for entry in sorted(removed, key=lambda path: path.name == description.EXPERIMENT):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
