"""Files that are written whole: a reader sees the old one or the new one, also after a crash.

Where the disk refuses them, a DiskError says how to go on.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from rayfl.errors import reason


class Taken(Exception):
    """Another process holds the lock."""


class DiskError(OSError):
    """A directory cannot be written to: one sentence that says which, why, and how to go on."""


@contextmanager
def writing(directory: Path, then: str) -> Iterator[None]:
    """An OSError inside becomes a DiskError about `directory`; `then` says what to do once the cause is removed."""
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
    """Turn safetensors' reports of the system's errors back into OSErrors."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def lock(path: Path) -> IO[bytes]:
    """Lock a file against other processes until it is closed, or until the process ends.

    Its directory is made. Taken where another process holds the lock; file systems without locks lock nothing.
    OSError where it cannot be opened; a link is not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Taken from None
    except OSError:
        pass
    return file


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file, which is not touched; False where that cannot be known."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it and rename it to `path`.

    OSError, which names a file, where the disk refuses; then nothing has changed.
    """
    partial = path.with_name(path.name + ".partial")
    # What a kill left; a link there must not lead the writing elsewhere.
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync_directory(path.parent)


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
