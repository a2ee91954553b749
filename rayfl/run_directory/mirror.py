"""A run directory's copy in object storage: it follows the run, can be resumed whenever it is read, and is fetched.

A file is copied when it has changed. Checkpoints come after the records that they rely on, and a checkpoint's manifest
after its other files, so that the copy is a run that goes on, wherever the copying is cut. Nothing but a run's own
files is read, written or removed there.
"""

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rayfl.errors import RayflError
from rayfl.run_directory.atomic_files import DiskError, sync_directory, writing
from rayfl.run_directory.object_storage import Storage, StorageError
from rayfl.run_directory.record import locked
from rayfl.run_directory.run_entries import MANIFEST, is_own_file, own_files, remove_entries, require_own_entries
from rayfl.run_directory.tables import SCHEMAS

log = logging.getLogger("rayfl")

_EXPERIMENT = "experiment.json"
_DESCRIPTION = (_EXPERIMENT, "platform.json")
_RECORDS, _CHECKPOINTS = "records/", "checkpoints/"
Check = Callable[[Path, Path], object]


class Standing(NamedTuple):
    """How far a run has come; a later one is larger. `saved`: rounds before its newest checkpoint, -1 without one."""

    saved: int
    finished: bool


def standing(names: Collection[str]) -> Standing | None:
    """How far the run has come that consists of files of these names; None: there is none."""
    if _EXPERIMENT not in names:
        return None
    rounds = [int(name.split("/")[1]) for name in names if _is_manifest(name)]
    return Standing(max(rounds, default=-1), all(f"{_RECORDS}{name}.parquet" in names for name in SCHEMAS))


def standing_here(directory: Path) -> Standing | None:
    """`standing` of the run in a directory."""
    return standing(list(own_files(directory)))


def require_writable(storage: Storage) -> None:
    """RayflError unless a run can be copied there."""
    try:
        storage.require_writable()
    except StorageError as error:
        raise RayflError(
            f"{storage.url} cannot be written to ({error}): make the bucket, give an account that may write there, or "
            "name another place in output.directory"
        ) from None


class Copies:
    """What of a run directory is in its copy, and the copying itself."""

    def __init__(self, directory: Path, storage: Storage) -> None:
        self.directory, self.storage = directory, storage
        self._copied: dict[str, tuple[int, int] | None] | None = None

    def update(self) -> None:
        """Copy what has changed, and remove there what is no longer here.

        StorageError or OSError where that fails; what was copied until then stays, and is a run that can go on.
        """
        try:
            if self._copied is None:
                self._copied = self._found()
            self._update()
        except OSError:
            # Who knows what is there, when it is there again.
            self._copied = None
            raise

    def is_behind(self) -> bool:
        """Whether the copy lacks a file, or has not come as far as the run here."""
        there, here = {name for name in self.storage.files() if is_own_file(name)}, set(own_files(self.directory))
        return not here <= there or standing(there) != standing(here)

    def _update(self) -> None:
        """See `update`."""
        assert self._copied is not None
        # In this order: a file that is made meanwhile waits for the next time.
        here = list(own_files(self.directory))
        gone: set[str] = set()
        for name in sorted(here, key=_place):
            if _is_manifest(name) and any(name.rpartition("/")[0] == one.rpartition("/")[0] for one in gone):
                continue
            if not self._put(name):
                gone.add(name)
            # A finished table is read instead of its stream, and must not be when the run has gone on.
            if name.startswith(_RECORDS):
                stem, _, suffix = name.rpartition(".")
                self._remove(f"{stem}.{'arrows' if suffix == 'parquet' else 'parquet'}", here)
        old = [name for name in self._copied if name not in here and name not in gone]
        for name in sorted(old, key=lambda name: not _is_manifest(name)):
            self._remove(name, here)

    def clear(self) -> None:
        """Remove the run that is there, its description first, so that what is left is no run."""
        for name in sorted(self.storage.files(), key=lambda name: name != _EXPERIMENT):
            if is_own_file(name):
                self.storage.remove(name)

    def _found(self) -> dict[str, tuple[int, int] | None]:
        """What is there already; of a checkpoint whose manifest is the one here, all files are as they are here."""
        there = {name for name in self.storage.files() if is_own_file(name)}
        found: dict[str, tuple[int, int] | None] = dict.fromkeys(there)
        for name in sorted(filter(_is_manifest, there)):
            # The run, which goes on, may remove an old checkpoint meanwhile.
            with suppress(FileNotFoundError):
                if (self.directory / name).read_bytes() == self.storage.read(name):
                    folder = name.removesuffix(MANIFEST)
                    here = (one for one in own_files(self.directory) if one.startswith(folder) and one in there)
                    found |= {one: _stamp(self.directory / one) for one in here}
        return found

    def _put(self, name: str) -> bool:
        """Copy a file if it has changed; False where it is no longer here."""
        assert self._copied is not None
        path = self.directory / name
        try:
            if self._copied.get(name) != _stamp(path):
                self._copied[name] = self.storage.put(name, path)
        except FileNotFoundError:
            return False
        return True

    def _remove(self, name: str, here: Collection[str]) -> None:
        """Remove a file there that is not among those `here`; one that may not be removed is only in the way."""
        assert self._copied is not None
        if name in self._copied and name not in here:
            try:
                self.storage.remove(name)
            except StorageError as error:
                log.debug("%s in %s could not be removed: %s", name, self.storage.url, error)
            del self._copied[name]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_manifest(name: str) -> bool:
    return name.startswith(_CHECKPOINTS) and name.endswith(f"/{MANIFEST}") and name.split("/")[1].isdecimal()


def _place(name: str) -> tuple[int, str]:
    """Where in the order of copying a file comes."""
    order = (
        name == _EXPERIMENT,
        name.startswith(_RECORDS),
        name.startswith(_CHECKPOINTS) and not _is_manifest(name),
        _is_manifest(name),
    )
    return next((number for number, is_it in enumerate(order, 1) if is_it), 0), name


class Mirror:
    """Keeps the copy of a run up to date from a thread of its own: a slow storage holds no round up."""

    def __init__(self, directory: Path, storage: Storage) -> None:
        self._copies = Copies(directory, storage)
        self._directory, self._url = directory, storage.url
        self._due, self._over = threading.Event(), False
        self._saved = -1
        self._failing = False
        # Where the process is ended at once, it does not wait for a storage.
        self._thread = threading.Thread(target=self._follow, name="rayfl.mirror", daemon=True)
        self._thread.start()

    def round_done(self) -> None:
        """A round is over: copy the run if there is a new checkpoint."""
        found = self._directory.glob(f"checkpoints/*[0-9]/{MANIFEST}")
        newest = max((int(path.parent.name) for path in found), default=-1)
        if newest != self._saved:
            self._saved = newest
            self._due.set()

    def _follow(self) -> None:
        while self._due.wait() and not self._over:
            self._due.clear()
            try:
                self._copies.update()
            except OSError as error:
                if not self._failing:
                    log.warning(
                        "%s cannot be written to (%s): the run goes on in %s, and is copied there again at the next "
                        "checkpoint",
                        self._url,
                        error,
                        self._directory,
                    )
                self._failing = True
                continue
            if self._failing:
                log.warning("%s can be written to again, and has all of the run", self._url)
            self._failing = False

    def finish(self) -> None:
        """Copy what is left. DiskError where that fails."""
        self._over = True
        self._due.set()
        self._thread.join()
        try:
            self._copies.update()
        except OSError as error:
            raise DiskError(
                f"{self._url} cannot be written to ({error}), so the newest results are in {self._directory} alone: "
                f"once it can, copy them there with: rayfl resume {self._directory}"
            ) from error

    def drop(self) -> None:
        """End without waiting for the storage."""
        self._over = True
        self._due.set()


@contextmanager
def mirrored(directory: Path, url: str | None) -> Iterator[Mirror | None]:
    """Copy the run in `directory` to `url` meanwhile and at the end, also where it fails; None: copy it nowhere.

    DiskError where the copying at the end fails; where the run itself has failed that is logged.
    """
    if url is None:
        yield None
        return
    try:
        mirror = Mirror(directory, Storage(url))
    except StorageError as error:
        raise DiskError(
            f"{url} cannot be reached ({error}): look at the address and the account, then try again"
        ) from error
    try:
        yield mirror
    except Exception:
        try:
            mirror.finish()
        except DiskError as error:
            log.warning("%s", error)
        raise
    except BaseException:
        mirror.drop()
        raise
    mirror.finish()


def fetch(storage: Storage, directory: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Fetch a run into an empty or missing directory, its description last.

    `leave_out`: beginnings of the names of files that are not needed. RayflError where there is no run, StorageError
    where the storage refuses, DiskError where the disk does.
    """
    names = [name for name in storage.files() if is_own_file(name) and not name.startswith(leave_out)]
    if _EXPERIMENT not in names:
        raise RayflError(f"{storage.url} is no run (it has no {_EXPERIMENT}): name the folder that a run made")
    for name in sorted(names, key=lambda name: name == _EXPERIMENT):
        with _on_disk(directory):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.fetch(name, path)


@contextmanager
def _on_disk(directory: Path) -> Iterator[None]:
    """Errors of the disk, and not of the storage, as DiskErrors."""
    try:
        yield
    except StorageError:
        raise
    except OSError:
        with writing(directory, "try again"):
            raise


def bring(storage: Storage, directory: Path, same: "Check" = lambda here, there: None) -> bool:
    """Make `directory` the run of a storage where that has come further; returns whether it was fetched.

    `same(directory, fetched)` raises where another run lies in `directory`, which is then left as it is. Errors are
    those of `fetch`.
    """
    there = standing(storage.files())
    here = standing_here(directory)
    if there is None or (here is not None and here >= there):
        return False
    if here is None and (directory / _RECORDS).exists():
        raise RayflError(f"{directory} is a run that lost its {_EXPERIMENT}: restore it, or move it away")
    # Beside its place, as a whole: what is cut here is fetched again.
    partial = directory.with_name(f"{directory.name}.fetched")
    with writing(directory, "try again"):
        if partial.exists():
            require_own_entries(partial)
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    try:
        fetch(storage, partial)
        if here is not None:
            same(directory, partial)
        with writing(directory, "try again"):
            if directory.exists():
                require_own_entries(directory)
                with locked(directory):
                    remove_entries(directory)
                    (directory / "lock").unlink(missing_ok=True)
            partial.replace(directory)
            sync_directory(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def copy_for_reading(url: str, leave_out: tuple[str, ...]) -> Path:
    """A copy of a run that lasts as long as this process. Errors are those of `fetch`."""
    storage, directory = Storage(url), _passing() / _name(url)
    fetch(storage, directory, leave_out)
    return directory


def copies_for_listing(url: str) -> Path:
    """A folder, as long as this process lasts, with the descriptions and records of all runs in a storage, each file of
    the age that it has there. StorageError where the storage refuses, DiskError where the disk does."""
    storage, folder = Storage(url), _passing() / _name(url)
    times = storage.files()
    runs = {name.removesuffix(_EXPERIMENT) for name in times if f"/{name}".endswith(f"/{_EXPERIMENT}")}
    for name, time in times.items():
        run = next((run for run in runs if _is_listed(name.removeprefix(run), name.startswith(run))), None)
        # Names of a storage are not those of a disk: such a one would lead out of the folder.
        if run is None or any(part in ("", "..") for part in run.split("/")[:-1]):
            continue
        with _on_disk(folder):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.fetch(name, path)
            os.utime(path, (time, time))
    return folder


def _is_listed(name: str, inside: bool) -> bool:
    """Whether a list of runs needs a file of this name, `inside` a run."""
    return inside and (name in _DESCRIPTION or (name.startswith(_RECORDS) and is_own_file(name)))


def _passing() -> Path:
    """A folder that lasts as long as this process."""
    home = Path(tempfile.mkdtemp(prefix="rayfl-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def _name(url: str) -> str:
    """The last part of a URL's path."""
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]
