"""Which files are a run's own: those that its parts declare. rayfl removes and copies no other, and follows no link."""

import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from os import stat_result
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.run_directory import description, disk, outputs, record, saved_models
from rayfl.run_directory.trackers import tracker

PARTS = (
    description.PART,
    record.PART,
    saved_models.PART,
    disk.CHECKPOINT_FILES,
    description.INPUT_FILES,
    tracker.PART,
    outputs.PART,
    description.NOTES_FILE,
    disk.PART,
)
"""The files of every part of a run, in the order of the documentation."""
_OWN = re.compile("|".join(f"({pattern})" for part in PARTS for pattern in part.patterns))
"""The paths of all files of a run."""


def _is_file(name: str) -> bool:
    """Whether a run may write a file with this path, or the temporary file from which it is renamed."""
    return any(map(_OWN.fullmatch, (name, name.removesuffix(".partial"))))


def is_own_file(name: str) -> bool:
    """Whether a run may have written a file with this path in its directory and needs it later."""
    return name != disk.LOCK and ".partial" not in name and ".." not in name.split("/") and _is_file(name)


def own_files(directory: Path) -> Iterator[str]:
    """The paths of the files in a run directory for which `is_own_file` holds; none if there is no directory."""
    if directory.is_dir():
        for path, status in _entries(directory):
            name = path.relative_to(directory).as_posix()
            if stat.S_ISREG(status.st_mode) and is_own_file(name):
                yield name


def require_own_entries(directory: Path) -> None:
    """Raise RayflError if `directory` holds, at any depth, a file or a link that no run wrote; the message names it.

    A folder is not worth a refusal: nothing is lost with it if it holds nothing else.
    """
    for path, status in _entries(directory):
        if stat.S_ISLNK(status.st_mode):
            raise RayflError(f"{path} is a link, which no run made: move it away, or name another directory")
        is_own = stat.S_ISREG(status.st_mode) and _is_file(path.relative_to(directory).as_posix())
        if not (is_own or stat.S_ISDIR(status.st_mode)):
            raise RayflError(f"{path} is not a file of a run: move it away, or name another directory")


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
