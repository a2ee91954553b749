"""Opens users' files only if they are regular files within a size limit.

Opening a pipe waits for ever, reading a device may never end, and opening one may have effects.
Links in users' folders may lead in a circle, or far above them.
"""

import difflib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from rayfl.errors import RayflError, reason
from rayfl.limits.memory import in_words, machine_bytes
from rayfl.untyped import Anything

_LONGEST_PART = 255
"""Bytes of a file's name, on most file systems."""
_SHOWN = 80
"""The most letters of an argument that a sentence shows."""


class Unopened(OSError):
    """A file that is not opened; the text is the reason, as the middle of a sentence."""


def require_regular(path: Path, most: int | None = None) -> None:
    """Raise OSError, whose `errors.reason` is for a user, unless `path` is a regular file.

    `most`: the most bytes that it may have; by default this machine's memory.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise Unopened(f"it is a link to {os.readlink(path)}, which does not exist") from None
        raise
    except ValueError:
        raise Unopened("its name holds a null character") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise Unopened("it is a pipe or a device, and only regular files are opened")
    limit, whose = (machine_bytes(), "this machine has memory for") if most is None else (most, "it may have")
    if status.st_size > limit:
        raise Unopened(f"it has {in_words(status.st_size)}, which is more than the {in_words(limit)} that {whose}")


def require_current_folder() -> None:
    """RayflError if the current directory was deleted: torch's libraries would end the process without a message."""
    try:
        os.getcwd()
    except OSError:
        raise RayflError("the current directory was deleted: change to another one, and try again") from None


def path_of(argument: Anything, what: str) -> Path:
    """The path that an argument gives; "" and None are the current directory. RayflError if it can be none."""
    require_current_folder()
    try:
        path = Path("" if argument is None else argument)
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    except (TypeError, ValueError):
        raise RayflError(f"{what}={repr(argument)[:_SHOWN]} is not a path: give a text or a pathlib.Path") from None
    if longest > _LONGEST_PART or "\0" in str(path):
        raise RayflError(
            f"{what}={repr(argument)[:_SHOWN]}: names of files have at most {_LONGEST_PART} bytes, no null character"
        )
    return path


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file of at most `most` bytes. Raise OSError for any other, see `require_regular`."""
    require_regular(path, most)
    return path.read_bytes()


def read_text(path: Path, most: int | None = None) -> str:
    """The UTF-8 text of a regular file, without a byte-order mark. Raise OSError or UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf-8-sig")


@contextmanager
def reading(path: Path, advice: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager: raise RayflError, which ends with `advice`, if the file cannot be read in the block.

    That is: if the block raises OSError, ValueError or one of `errors`. A RayflError passes through.
    """
    try:
        yield
        return
    except (RayflError, MemoryError):
        raise
    except FileNotFoundError:
        raise RayflError(absent(path, advice)) from None
    except UnicodeDecodeError:
        why = "it is no UTF-8 text"
    except (OSError, ValueError, *errors) as error:
        # What follows is for programmers.
        why = re.split(r"[;\n]", reason(error))[0].rstrip(".") or type(error).__name__
    raise RayflError(f"{path} cannot be read ({why}); {advice}")


def absent(path: Path, otherwise: str) -> str:
    """The sentence for a missing file: the folder that was searched, and the nearest name in it, or `otherwise`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"{path} does not exist, nor does the folder {folder}; {otherwise}"
    stems = [file.stem for file in folder.glob(f"*{path.suffix}") if file.name != "pyproject.toml"]
    close = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.5)
    return f"{path} (in {folder}) does not exist; {f'did you mean {close[0] + path.suffix!r}?' if close else otherwise}"


def expanded(path: str | Path) -> Path:
    """Replace ~ and ~user in the path. Raise RayflError if the user's home is unknown."""
    home_path = Path(os.path.expanduser(path))
    if home_path.parts and home_path.parts[0].startswith("~"):
        raise RayflError(f"{path}: the home folder {home_path.parts[0]} is unknown; give a path without ~")
    return home_path


def is_folder(path: Path, around: Sequence[Path] = ()) -> bool:
    """Whether `path` is a folder, or a link to one. Raise RayflError for a link to a folder around it.

    Those are the folders that contain it, and `around`, those through which it was reached, without links.
    """
    if path.is_symlink() and path.is_dir():
        real = Path(os.path.realpath(path))
        if any(outer.is_relative_to(real) for outer in (Path(os.path.realpath(path.parent)), *around)):
            raise RayflError(f"{path} is a link to {real}, a folder around it, so its files have no end: remove it")
    return path.is_dir()


def files_below(folder: Path, lenient: bool = False, around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files in `folder` at any depth, links followed: those of each folder before those of its folders, by name.

    What archives made on a Mac have beside the files (._NAME, __MACOSX) is left out. Raise RayflError as `is_folder`
    does, and for a folder that cannot be read. `lenient`: these are left out, and so is what is hidden. `around`: as of
    `is_folder`.
    """
    inside: list[Path] = []
    left_out = (".", "__MACOSX") if lenient else ("._", "__MACOSX")
    with suppress(RayflError) if lenient else nullcontext(), reading(folder, "repair or remove it"):
        is_folder(folder, around)
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith(left_out))
    folders = [path for path in inside if path.is_dir()]
    yield from sorted({*inside} - {*folders})
    for path in folders:
        yield from files_below(path, lenient, (*around, Path(os.path.realpath(folder))))
