"""The lock of a run directory, with which one process at a time writes to it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rayfl.errors import RayflError
from rayfl.run_directory.run_files import RunFiles

LOCK = "lock"
FILES = RunFiles((LOCK,), {"`lock`": "held by the process that writes to the directory"})
_RETRY_S = 1.0
"""Seconds for which a taken lock is tried again: a killed process holds it until the kernel has freed its memory."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context manager: make a run directory if it is missing, and keep other processes from writing to it.

    Raise RayflError if another process writes to it, and still does after `_RETRY_S`. Raise OSError if the disk
    refuses, or if the lock is a link. A file system without locks locks nothing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    until = time.monotonic() + _RETRY_S
    with os.fdopen(os.open(directory / LOCK, flags, 0o666), "ab") as file:
        while _is_taken(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise RayflError(f"{directory} is being written by a run that goes on; wait for it or end it")
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
    """Try to lock a file; whether another process holds its lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
