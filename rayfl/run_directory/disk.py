"""Writing to a run directory: under its lock, and each file whole, so a reader sees the old file or the new one; and
the folders of checkpoints, each as a whole or not at all. It loads no torch: lists of runs and copies need it.

This holds even after a crash. If writing fails, a DiskError says how to continue.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from safetensors import SafetensorError

from rayfl.errors import RayflError, reason


class RunFiles(NamedTuple):
    """The files of one part of a run: a constant PART beside the code that writes them, which run_files.py collects.

    Together they are everything that a run may write, that `--overwrite` removes and that a copy in object storage has;
    docs/reference/run-directory.md lists them.

    `patterns`: regular expressions of their paths in the run directory. `.+` at the end matches at any depth.
    `documented`: the names that the documentation gives these files, and their content.
    """

    patterns: tuple[str, ...]
    documented: Mapping[str, str]


LOCK = "lock"
PART = RunFiles((LOCK,), {"`lock`": "held by the process that writes to the directory"})
_OWNERS = 0o600
"""The mode of a file that its owner alone may open."""
_RETRY_S = 1.0
"""Seconds for which a taken lock is tried again: a killed process holds it until the kernel has freed its memory."""
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP), "move {} away"),
}
"""What removes the cause of an error; `{}` stands for the file."""

_Value = TypeVar("_Value")

Stamp = tuple[int, int, int]
"""Size, time of the last change in ns, and number of a file."""


class DiskError(OSError):
    """A directory cannot be written to: one sentence that says which, why, and how to go on."""


@contextmanager
def writing(directory: Path, then: str) -> Iterator[None]:
    """Turn an OSError in the block into a DiskError about `directory`; `then`: what to do once the cause is removed."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "check the disk").format(error.filename or "what is in its way")
        raise DiskError(f"{directory} cannot be written to ({reason(error)}): {cure}, then {then}") from error


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Turn a SafetensorError that reports an error of the operating system into an OSError."""
    try:
        yield
    except SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


def write_whole(path: Path, write: Callable[[Path], object], partial: Path | None = None) -> None:
    """Let `write` fill the temporary file `partial`, sync it and rename it to `path`. `partial`: NAME.partial if None.

    Raise OSError, which names `path`, if writing fails; then nothing has changed.
    """
    partial = partial or path.with_name(path.name + ".partial")
    # A killed process may have left one. A link there must not redirect the writing.
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, whole. NaN and infinity stay as Python's json writes and reads them."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync_directory(directory: Path) -> None:
    """Make renames and removals inside `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stamp(path: Path) -> Stamp:
    """What changes if somebody writes to a file; links of one file have one stamp."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def portions(
    parts: Iterable[Mapping[str, _Value]], num_bytes: Callable[[Mapping[str, _Value]], int], most: int
) -> Iterator[dict[str, _Value]]:
    """Join mappings, which have different keys, until they are larger than `most` bytes: one portion for each file."""
    portion: dict[str, _Value] = {}
    size = 0
    for part in parts:
        portion.update(part)
        size += num_bytes(part)
        if size > most:
            yield portion
            portion, size = {}, 0
    if portion:
        yield portion


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context manager: make a run directory if it is missing, and keep other processes from writing to it.

    Only this user may open the lock, because whoever can open a file can hold it. Raise RayflError if another process
    writes to the directory, and still does after `_RETRY_S`. Raise OSError if the lock cannot be opened or is a link. A
    file system without locks locks nothing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    until = time.monotonic() + _RETRY_S
    with os.fdopen(os.open(directory / LOCK, flags, _OWNERS), "ab") as file:
        # Of an older run, or under an unusual umask, it has another mode; that of another user stays as it is.
        with suppress(OSError):
            os.fchmod(file.fileno(), _OWNERS)
        while _is_taken(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise RayflError(f"another process is writing to {directory}; wait until it ends, or end it")
            time.sleep(0.05)
        yield


def is_locked(directory: Path) -> bool:
    """Whether a process writes to a run directory; False if that cannot be known. The lock is left as it is."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(directory / LOCK, flags), "rb") as file:
            return _is_taken(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _is_taken(file: IO[bytes], kind: int) -> bool:
    """Try to lock a file; return whether another process holds the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATES = r"(server|(states|memories|messages|models|begun)-[0-9]{4,})\.safetensors"
"""The files of states in a checkpoint."""
_CHECKPOINT = r"checkpoints/[0-9]{8,}(\.partial)?"
CHECKPOINT_FILES = RunFiles(
    (rf"{_CHECKPOINT}/manifest\.json", rf"{_CHECKPOINT}/{STATES}"),
    {"`checkpoints/`": "the states from which the run resumes; the name of a folder is the number of rounds before it"},
)
_KEPT = 2


class DamagedFile(RayflError):
    """A file of a checkpoint is not what was written."""


def round_of(name: str) -> int | None:
    """The rounds before the checkpoint whose manifest is the file `name` of a run directory; None for other files."""
    match = re.fullmatch(rf"{CHECKPOINTS}/([0-9]+)/{re.escape(MANIFEST)}", name)
    return int(match[1]) if match else None


def checkpoints(directory: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by the number of rounds before them, newest first; their content is not
    checked."""
    home = directory / CHECKPOINTS
    paths = [path for path in home.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name)] if home.is_dir() else []
    return {int(path.name): path for path in sorted(paths, key=lambda path: int(path.name), reverse=True)}


@contextmanager
def new_checkpoint(directory: Path, round_number: int) -> Iterator[Path]:
    """Yield the folder for the files of the checkpoint before `round_number`; after the block it is in its place.

    The checkpoint before it is kept, in case the newest gets damaged.

    If the block raises, or writing fails (OSError), the earlier checkpoints are as they were.
    """
    home = directory / CHECKPOINTS
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{round_number:08d}"
    before = checkpoints(directory)
    # A run that resumed from an earlier checkpoint cannot use the later ones.
    kept = [path for earlier, path in before.items() if earlier < round_number][: _KEPT - 1]
    partial = home / f"{folder.name}.partial"
    for left in (*home.glob("*.partial"), folder):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(home)
    for old in {*before.values()} - {folder, *kept}:
        shutil.rmtree(old, ignore_errors=True)
