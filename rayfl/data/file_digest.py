"""Digests of data files by their content, so that a run on changed data counts as another run.

A process keeps a digest with size, modification time, change time and inode of the files, and computes it again only if
one of these changes.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rayfl.errors import RayflError, reason
from rayfl.limits.regular_files import files_below, require_regular

# Settings are read before torch is loaded.
if TYPE_CHECKING:
    from rayfl.data.datasets import Source

MOST_BYTES = 10 * 10**9
"""Data of more bytes are only sampled."""
LENGTH = 12
"""Hexadecimal digits of a digest."""
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
"""Number and size of the blocks of an example, evenly spaced from a file's first byte to its last."""
_SETTLED_S = 2.0
"""Clocks of file systems are this coarse: a file that changed later may change again with the same times."""
_known: dict[str, str] = {}
"""The digests that this process has made."""

FileEntry = tuple[str, Path, os.stat_result]
"""A file's name below the folder that is digested, its path and its status."""


def content_digest(path: Path) -> str:
    """The first 12 hexadecimal digits of a file's SHA-256, or of that of the names and digests of a folder's files.

    Hidden files, those called cache-*.arrow, and links to a folder around them do not count. Of more than 10 GB only
    names, sizes and a sample of each file count, and the digest begins with "sample-". Raise OSError if `path` is
    neither a regular file nor a folder, and RayflError if a file in the folder cannot be read.
    """
    files = list(_files(path))
    size = sum(status.st_size for _, _, status in files)
    times = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for name, _, s in files]
    key = hashlib.sha256(json.dumps([str(path.absolute()), MOST_BYTES, times]).encode()).hexdigest()
    digest = _known.get(key) or _digest(files, size)
    if all(max(s.st_mtime, s.st_ctime) < time.time() - _SETTLED_S for _, _, s in files):
        _known[key] = digest
    return digest


def _files(path: Path) -> Iterator[FileEntry]:
    """The regular files at `path`, sorted by their names below it."""
    if not path.is_dir():
        require_regular(path, most=1 << 62)
        yield "", path, path.stat()
        return
    for file in files_below(path, lenient=True):
        cached = file.name.startswith("cache-") and file.suffix == ".arrow"
        if not cached and file.is_file():
            yield str(file.relative_to(path)), file, file.stat()


def _digest(files: Sequence[FileEntry], size: int) -> str:
    is_complete = size <= MOST_BYTES
    digests = [(name, status.st_size, _of_file(path, is_complete)) for name, path, status in files]
    if is_complete and len(digests) == 1 and not digests[0][0]:
        return digests[0][2][:LENGTH]
    together = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:LENGTH]
    return together if is_complete else f"sample-{together}"


def _of_file(path: Path, is_complete: bool) -> str:
    """SHA-256 of a file, or of blocks of it (of all of it if it is small)."""
    try:
        with open(path, "rb") as file:
            if is_complete:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256()
            size = path.stat().st_size
            for block in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
            return digest.hexdigest()
    except OSError as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}); repair or remove it") from None


def source_digests(source: "Source") -> dict[str, str]:
    """The digest of each file and folder that a source reads, by its path from the folder that has all of them.

    Missing files are left out, because loading reports them. Raise RayflError, with the file's name, if its digest is
    not the one in the source's settings, or if a file cannot be read or downloaded.
    """
    paths = [path.absolute() for path in source.files()]
    home = os.path.commonpath([path.parent for path in paths]) if paths else ""
    digests: dict[str, str] = {}
    for path in paths:
        with suppress(OSError):
            digests[os.path.relpath(path, home)] = content_digest(path)
    named = digests if source.digest is None else source.digest
    for name in sorted({*digests, *named}):
        expected, actual = named.get(name), digests.get(name)
        if expected != actual:
            what = (
                f"is missing, and data.digest names it with {expected}"
                if actual is None
                else "is not among the files that data.digest names"
                if expected is None
                else f"has not the content that the experiment names: data.digest says {expected}, and it is {actual}"
            )
            raise RayflError(
                f"{Path(home, name)} {what}; put the file back, give its data.path=PATH, or start a new run without "
                "data.digest"
            )
    return digests
