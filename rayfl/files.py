"""Files that are written whole: a reader, and whoever comes after a crash, sees the old one or the new one."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


class Taken(Exception):
    """Another process holds the lock."""


def lock(path: Path) -> IO[bytes]:
    """A file that no other process can lock until it is closed; the system lets go of it with the process.

    Its directory is made. Taken where another process has it; file systems without locks lock nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Taken from None
    except OSError:
        pass
    return file


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it and rename it to `path`."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
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
