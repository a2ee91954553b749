"""The files that a run may leave in its directory. Nothing else there is ever removed, and no link is followed."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rayfl.errors import RayflError

MANIFEST = "manifest.json"
"""The file of a checkpoint that says what belongs to it."""
_FOLDERS = re.compile(
    r"""(records | tensorboard | models | files | checkpoints(/[0-9]{8,}(\.partial)?)?
    | mlflow(/(\.trash | [0-9]+(/[0-9a-f]{32}(/(metrics(/.+)? | params(/.+)? | tags(/.+)? | artifacts(/models)?))?)?))?
    | wandb(/(offline-)?run-[0-9_]+-[0-9a-f]{8}(-[0-9]+)?(/(files(/.+)? | logs | tmp(/.+)?))?)?
    )/""",
    re.VERBOSE,
)
_FILES = re.compile(
    r"""(experiment\.json | experiment\.toml | platform\.json | origin\.json | report\.html | lock | trackers\.json
    | records/(rounds|clients|metrics)\.(arrows|parquet)
    | tensorboard/events\.out\.tfevents\.[^/]+
    | mlflow/[0-9]+(/[0-9a-f]{32})?/meta\.yaml
    | mlflow/[0-9]+/tags/mlflow\.[^/]+
    | mlflow/[0-9]+/[0-9a-f]{32}/((metrics | params | tags)/.+ | artifacts/experiment\.toml)
    | mlflow/[0-9]+/[0-9a-f]{32}/artifacts/models/(global|personal)(-[0-9]{4,})?\.safetensors
    | wandb/(offline-)?run-[0-9_]+-[0-9a-f]{8}(-[0-9]+)?/
        (run-[0-9a-f]{8}\.wandb(\.synced)? | logs/debug[a-z-]*\.log | files/.+)
    | wandb/debug[a-z-]*\.log
    | models/(global|personal)(-[0-9]{4,})?\.safetensors
    | files/(trace|graph|plugin)-[0-9a-f]{12}(\.[^/]*)?
    | checkpoints/[0-9]{8,}(\.partial)?/(manifest\.json | (server|(states|memories)-[0-9]{4,})\.safetensors)
    )(\.partial)? | \.rayfl-[0-9]+-[0-9]+\.partial""",
    re.VERBOSE,
)


def is_own_file(name: str) -> bool:
    """Whether a run may have written a file of this name (its path in the run directory) and needs it later."""
    passing = name == "lock" or ".partial" in name
    return not passing and ".." not in name.split("/") and _FILES.fullmatch(name) is not None


def own_files(directory: Path) -> Iterator[str]:
    """The names of the files in a run directory for which `is_own_file` holds; none where there is no directory."""
    if directory.is_dir():
        for path, status in _entries(directory):
            name = path.relative_to(directory).as_posix()
            if stat.S_ISREG(status.st_mode) and is_own_file(name):
                yield name


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, also of one that lost a file."""
    names = ("experiment.json", "platform.json", "experiment.toml", "records")
    first, second, *others = ((directory / name).exists() for name in names)
    return (first and second) or ((first or second) and any(others))


def real_parent(path: Path) -> Path:
    """The directory in which `path` lies, links resolved."""
    # Path.resolve raises where links lead in a circle.
    return Path(os.path.realpath(path.absolute().parent))


def run_around(path: Path) -> Path | None:
    """The run directory in which `path` lies or would lie; None where there is none."""
    home = real_parent(path)
    return next((folder for folder in (home, *home.parents) if is_run(folder)), None)


def require_own_entries(directory: Path) -> None:
    """RayflError, which names it, for anything in `directory`, however deep, that no run wrote."""
    foreign: list[Path] = []
    for path, status in _entries(directory):
        name = path.relative_to(directory).as_posix()
        if stat.S_ISLNK(status.st_mode):
            raise RayflError(f"{path} is a link, which no run made: move it away, or name another directory")
        file = _FILES.fullmatch(name)
        # An empty directory in a file's place is damage, of which nothing is lost.
        folder = stat.S_ISDIR(status.st_mode) and (_FOLDERS.fullmatch(f"{name}/") or file)
        if not (folder or (stat.S_ISREG(status.st_mode) and file)):
            foreign.append(path)
    if foreign:
        first = next((path for path in foreign if not path.is_dir()), foreign[0])
        raise RayflError(f"{first} was written by no run: move it away, or name another directory")


def require_no_links(directory: Path) -> None:
    """RayflError for a link in a run directory, through which a run would write to another place."""
    for path, status in _entries(directory):
        if stat.S_ISLNK(status.st_mode):
            raise RayflError(
                f"{path} is a link, and a run writes only into its own directory: move what it leads to into its place"
            )


def _entries(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything in a directory and below, outermost first; links are not followed."""
    for entry in sorted(directory.iterdir()):
        try:
            status = entry.lstat()
        except FileNotFoundError:
            # A run that goes on has removed it between the two looks.
            continue
        yield entry, status
        if stat.S_ISDIR(status.st_mode):
            with suppress(FileNotFoundError):
                yield from _entries(entry)


def remove_entries(directory: Path) -> None:
    """Remove everything in a run directory but its lock; the experiment goes last, so that a cut leaves a run."""
    last = "experiment.json"
    for entry in sorted(directory.iterdir(), key=lambda path: path.name == last):
        if entry.name == "lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def make_directory(path: Path) -> list[Path]:
    """Make a directory and what is missing above it; returns what was made, outermost first.

    OSError where the disk refuses, or where somebody else makes `path` meanwhile; then nothing is left of it.
    """
    above = list(path.parents)
    missing = above[: next((number for number, one in enumerate(above) if one.exists()), len(above))][::-1]
    made: list[Path] = []
    try:
        for folder in (*missing, path):
            # Another run may make the folders above at the same moment; the last is for one of them.
            with suppress(*([FileExistsError] * (folder != path))):
                folder.mkdir()
                made.append(folder)
    except OSError:
        remove_directories(made)
        raise
    return made


def remove_directories(made: list[Path]) -> None:
    """Remove directories that `make_directory` made, as far as they are empty."""
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError:
            return
