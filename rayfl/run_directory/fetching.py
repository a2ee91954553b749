"""Runs that are fetched from object storage: to go on with them, or to read and list them."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.run_directory.description import EXPERIMENT, PLATFORM
from rayfl.run_directory.disk import LOCK, locked, sync_directory, writing
from rayfl.run_directory.mirror import reached
from rayfl.run_directory.object_storage import Storage, opened
from rayfl.run_directory.own_entries import is_own_file, own_files, remove_entries, require_own_entries


def fetch(storage: Storage, directory: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Fetch a run into an empty or missing directory, its experiment last.

    `leave_out`: files whose paths begin so are not fetched. Raise RayflError if there is no run, StorageError if the
    storage refuses, DiskError if the disk does.
    """
    names = [name for name in storage.files() if is_own_file(name) and not name.startswith(leave_out)]
    if EXPERIMENT not in names:
        raise RayflError(f"{storage.url} is no run (it has no {EXPERIMENT}): name the folder that a run made")
    for name in sorted(names, key=lambda name: name == EXPERIMENT):
        _fetch_file(storage, name, directory)


def _fetch_file(storage: Storage, name: str, directory: Path) -> None:
    """Fetch one file to the same path in `directory`."""
    path = directory / name
    with writing(directory, "try again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.fetch(name, path)


def fetch_newer(storage: Storage, directory: Path, require_same: Callable[[Path, Path], object]) -> bool:
    """Make `directory` the run in a storage if the run there has come further; returns whether it was fetched.

    `require_same(directory, fetched)` raises if another run lies in `directory`, which then stays as it is. Errors are
    those of `fetch`.
    """
    there, here = reached(storage.files()), reached(list(own_files(directory)))
    if there is None or (here is not None and here >= there):
        return False
    if here is None and (directory / "records").exists():
        raise RayflError(f"{directory} is a run that lost its {EXPERIMENT}: restore it, or move it away")
    # Beside its place and as a whole: if this is cut, the next call fetches again.
    partial = directory.with_name(f"{directory.name}.fetched")
    with writing(directory, "try again"):
        if partial.exists():
            require_own_entries(partial)
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    try:
        fetch(storage, partial)
        if here is not None:
            require_same(directory, partial)
        with writing(directory, "try again"):
            if directory.exists():
                require_own_entries(directory)
                with locked(directory):
                    remove_entries(directory)
                    (directory / LOCK).unlink(missing_ok=True)
            partial.replace(directory)
            sync_directory(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def copy_for_reading(url: str, leave_out: tuple[str, ...] = ("checkpoints/",)) -> Path:
    """A copy of the run at a URL that lasts as long as this process.

    Raise RayflError if it cannot be read, DiskError if the disk refuses.
    """
    directory = _temporary(url)
    with opened(url) as storage:
        fetch(storage, directory, leave_out)
    return directory


def copies_for_listing(url: str) -> Path:
    """A folder with the descriptions and records of all runs below a URL, with the times that the files have there.

    It lasts as long as this process. Raise RayflError if the storage cannot be read, DiskError if the disk refuses.
    """
    folder = _temporary(url)
    with opened(url) as storage:
        times = storage.files()
        runs = {name.removesuffix(EXPERIMENT) for name in times if f"/{name}".endswith(f"/{EXPERIMENT}")}
        # The names in a storage are not those of a disk: such a name would lead out of the folder.
        runs = {run for run in runs if not any(part in ("", "..") for part in run.split("/")[:-1])}
        for name, time in times.items():
            if any(name.startswith(run) and _is_listed(name.removeprefix(run)) for run in runs):
                _fetch_file(storage, name, folder)
                os.utime(folder / name, (time, time))
    return folder


def _is_listed(name: str) -> bool:
    """Whether a list of runs needs the file `name` of a run."""
    return name in (EXPERIMENT, PLATFORM) or (name.startswith("records/") and is_own_file(name))


def _temporary(url: str) -> Path:
    """A folder that is called like the last part of a URL, and removed when this process ends."""
    home = Path(tempfile.mkdtemp(prefix="rayfl-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home / url.partition("?")[0].rstrip("/").rpartition("/")[2]
