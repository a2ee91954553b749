"""Files whose place the user names, such as a report. rayfl never replaces a file of others unasked.

rayfl recognises a file that it wrote by a mark near the beginning.
"""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from rayfl.errors import RayflError, reason
from rayfl.run_directory.description import is_run
from rayfl.run_directory.disk import RunFiles, write_whole

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


PART = RunFiles((r"report\.html", r"\.rayfl-[0-9a-f]{16}\.partial"), {"`report.html`": "the page"})


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
