"""Files that are written whole: a reader sees the old file or the new one, even after a crash.

If the disk refuses, a DiskError says how to go on.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from rayfl.errors import reason


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
        raise DiskError(f"{directory} cannot be written to ({reason(error)}): {_cure(error)}, then {then}") from error


def _cure(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make it writable"
    if error.errno in (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP) and error.filename:
        return f"move {error.filename} away"
    return "check the disk"


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Turn a SafetensorError about an error of the system into an OSError."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def write_whole(path: Path, write: Callable[[Path], object], partial: Path | None = None) -> None:
    """Let `write` fill the temporary file `partial`, sync it and rename it to `path`. `partial`: NAME.partial if None.

    Raise OSError, which names `path`, if the disk refuses; then nothing has changed.
    """
    partial = partial or path.with_name(path.name + ".partial")
    # What a kill left; a link there must not lead the writing elsewhere.
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
