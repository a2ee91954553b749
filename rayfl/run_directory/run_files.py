"""Which files rayfl may write, copy, replace and remove: a run's own, which its parts declare, and files whose place
the user names, such as a report. It follows no link, and never replaces a file of others unasked."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os import stat_result
from pathlib import Path
from secrets import token_hex

from rayfl.errors import RayflError, reason
from rayfl.run_directory import description, disk, record, saved_models
from rayfl.run_directory.description import is_run
from rayfl.run_directory.disk import RunFiles, write_whole
from rayfl.run_directory.trackers import tracker

_MARKED_BYTES = 1 << 16
"""The mark of a file is within this many bytes of its beginning."""


@dataclass(frozen=True)
class OutputKind:
    """A kind of file: its name in sentences, and its mark; without a mark, no such file is recognised."""

    name: str
    mark: bytes | None = None
    in_run: str | None = None
    """The only name that it may have inside a run directory; None: it may not be there."""


REPORT = OutputKind("a report", b" - rayfl report</title>", "report.html")
PAGE = RunFiles((r"report\.html", r"\.rayfl-[0-9a-f]{16}\.partial"), {"`report.html`": "the page"})


def require_replaceable(path: Path, kind: OutputKind, overwrite: bool = False) -> None:
    """Raise RayflError unless a file of this kind may be written to `path`.

    It may replace nothing, a file of the same kind, or, with `overwrite`, any regular file. It may never follow a link
    or replace a file of a run.
    """
    # Path.resolve raises if links lead in a circle.
    home = Path(os.path.realpath(path.absolute().parent))
    run = next((folder for folder in (home, *home.parents) if is_run(folder)), None)
    if run is not None and (kind.in_run is None or run / kind.in_run != home / path.name):
        other = f", or {run / kind.in_run}" if kind.in_run else ""
        raise RayflError(
            f"{path} lies in a run directory, which holds the run's own files only: name another place{other}"
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RayflError(f"{path} cannot be written ({reason(error)}): name another place") from None
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise RayflError(f"{path} is {what}, so {kind.name} cannot be written there: name another place")
    with suppress(OSError), open(path, "rb") as file:
        overwrite = overwrite or (kind.mark is not None and kind.mark in file.read(_MARKED_BYTES))
    if not overwrite:
        raise RayflError(
            f"{path} is there already and is not known to be {kind.name} of rayfl: name another place, or give "
            "--overwrite"
        )


def write_output(path: Path, content: bytes, kind: OutputKind, overwrite: bool = False) -> None:
    """Write a file whole. Raise RayflError as `require_replaceable` does, OSError if writing fails."""
    require_replaceable(path, kind, overwrite)
    # A random name: a file of the user may have any other one.
    partial = path.with_name(f".rayfl-{token_hex(8)}.partial")
    write_whole(path, lambda partial: partial.write_bytes(content), partial)


PARTS = (
    description.PART,
    record.PART,
    saved_models.PART,
    disk.CHECKPOINT_FILES,
    description.INPUT_FILES,
    tracker.PART,
    PAGE,
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
