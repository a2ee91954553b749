"""The place of a run: a directory of this machine, and its copy in object storage if `output.directory` is a URL.

The copy is kept up to date during the run, and fetched to resume or read it. If copying is interrupted, the copy is
still a run that can be resumed: a checkpoint comes after the records that it relies on, and its manifest after its
other files. Only changed files are copied. Only a run's own files are written or removed.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rayfl.errors import RayflError, log
from rayfl.run_directory.description import EXPERIMENT, is_left_over, is_run
from rayfl.run_directory.disk import (
    CHECKPOINTS,
    LOCK,
    MANIFEST,
    DiskError,
    Stamp,
    checkpoints,
    locked,
    round_of,
    stamp,
    sync_directory,
    writing,
)
from rayfl.run_directory.object_storage import Storage, StorageError, below, is_url, opened, parted
from rayfl.run_directory.record import SCHEMAS, read_records
from rayfl.run_directory.run_files import is_own_file, own_files, remove_entries, require_own_entries

LOCAL = Path("runs")
"""The folder on this machine of the runs whose `output.directory` is a URL."""


@dataclass(frozen=True)
class RunFolder:
    """The place of one run: `directory` on this machine; `output`: the `output.directory` of its experiment."""

    directory: Path
    output: str

    @classmethod
    def at(cls, location: Path | str | None, output: str, name: str = "") -> "RunFolder":
        """The folder of the run at `location`, a directory or the URL of a copy. A URL also gives `output`.

        None: the folder of the run of this name in an `output.directory`.
        """
        if isinstance(location, str):
            output, name = parted(location)
        if not isinstance(location, Path):
            location = (LOCAL if is_url(output) else Path(output)) / name
        return cls(location.absolute(), output)

    @property
    def url(self) -> str | None:
        """The URL of the copy; None if there is none."""
        return below(self.output, self.directory.name) if is_url(self.output) else None

    def next_free(self) -> "RunFolder":
        """This folder if nothing is there, here or in the storage; else the first free one of NAME-2, NAME-3, ..."""
        number = 1
        folder = self
        while folder.directory.exists() or (folder.url is not None and _has_files(folder.url)):
            number += 1
            folder = RunFolder(self.directory.with_name(f"{self.directory.name}-{number}"), self.output)
        return folder

    def require_writable_copy(self, may_hold_run: bool) -> None:
        """Raise RayflError unless a run can be copied to the storage. `may_hold_run`: whether a run may be there."""
        if self.url is None:
            return
        with opened(self.url) as storage:
            storage.require_writable()
            if not may_hold_run and EXPERIMENT in storage.files():
                raise RayflError(
                    f"{self.url} holds a run: continue it with rayfl resume, name another place, or give --overwrite"
                )

    @contextmanager
    def made(self, overwrite: bool = False, numbered: bool = False) -> Iterator["RunFolder"]:
        """Make the directory of a new run; yields the folder.

        If the block raises RayflError before a round is recorded, or OSError before the experiment is written, the
        directory is removed. `overwrite`: an earlier run is removed, here and in the storage. `numbered`: if another
        run has taken the name meanwhile, take the next free one. Errors are those of `create_run_directory`.
        """
        folder = self
        while True:
            path = folder.directory
            try:
                if numbered:
                    path.mkdir(parents=True)
                else:
                    create_run_directory(path, overwrite)
                break
            except FileExistsError:
                folder = self.next_free()
        try:
            if overwrite and folder.url is not None:
                with opened(folder.url) as storage:
                    Copies(path, storage).clear()
            yield folder
        except (ValueError, OSError) as error:
            if not is_run(path) or (isinstance(error, ValueError) and not len(read_records(path, "rounds"))):
                with suppress(OSError):
                    remove_entries(path)
                    (path / LOCK).unlink(missing_ok=True)
                    path.rmdir()
            raise

    def mirrored(self) -> AbstractContextManager[Callable[[], None]]:
        """Copy the run to its storage, if it has one, while the `with` block runs, and at its end; see `mirrored`."""
        if self.url is None:
            return nullcontext(lambda: None)
        try:
            return mirrored(self.directory, Storage(self.url))
        except StorageError as error:
            raise DiskError(
                f"{self.url} cannot be reached ({error}): check the address and the account, then try again"
            ) from error

    def is_copy_behind(self) -> bool:
        """Whether the copy lacks something of the run. Raise RayflError if the storage cannot be read."""
        if self.url is None:
            return False
        with opened(self.url) as storage:
            return Copies(self.directory, storage).is_behind()


def _has_files(url: str) -> bool:
    with opened(url) as storage:
        return bool(storage.files())


def create_run_directory(path: Path, overwrite: bool = False) -> Path:
    """Make an empty directory for a run; returns it.

    Files of a run that was killed before its experiment was written are removed. With `overwrite`, so is an earlier
    run to which no process writes. The lock stays. Raise RayflError if `path` holds anything else, at any depth;
    OSError if writing fails.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if require_free(path, overwrite):
            with locked(path):
                # Another process may have begun a run here meanwhile.
                require_free(path, overwrite)
                remove_entries(path)
    return path


def require_free(path: Path, overwrite: bool = False) -> bool:
    """Raise RayflError if `create_run_directory` cannot use `path`. Return True if it must remove something there."""
    if path.is_symlink() and not path.exists():
        raise RayflError(f"{path} is a link to nothing: remove it, or name another directory")
    if not path.exists():
        return False
    if not path.is_dir():
        raise RayflError(f"{path} is a file: name a directory for the run")
    # A lock file that nobody holds does not count.
    names = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if EXPERIMENT in names:
        if not overwrite:
            raise RayflError(f"{path} holds a run: name another directory, or give --overwrite")
    elif "records" in names:
        raise RayflError(f"{path} is a run that lost its {EXPERIMENT}: restore it, or name another directory")
    elif foreign := [name for name in names if not is_left_over(name)]:
        raise RayflError(
            f"{path} is not empty and holds something other than a run ({foreign[0]}), which rayfl never deletes: name "
            "another directory"
        )
    require_own_entries(path)
    return bool(names)


def reached(names: Collection[str]) -> tuple[int, bool] | None:
    """How far the run with these files has come; None if they are not those of a run.

    The rounds before its newest checkpoint, or -1, and whether all its tables are finished: of two runs, the one that
    has come further compares larger.
    """
    if EXPERIMENT not in names:
        return None
    saved = max((rounds for name in names if (rounds := round_of(name)) is not None), default=-1)
    return saved, all(f"records/{name}.parquet" in names for name in SCHEMAS)


@dataclass
class Copies:
    """Copies the changed files of a run directory to a storage.

    `copied`: the stamps of the files that this process has copied.
    """

    directory: Path
    storage: Storage
    copied: dict[str, Stamp] = field(default_factory=dict)

    def update(self) -> None:
        """Copy what has changed, and remove from the copy what the directory no longer has.

        Raise StorageError or OSError if that fails; the copy is then still a run that can be resumed.
        """
        here, copied = set(own_files(self.directory)), self._there()
        gone = copied - here
        lost = set[str]()
        for name in sorted(here | copied, key=lambda name: (_step(name, name in gone), name)):
            if name in gone:
                # If it may not be removed it stays, and does no harm.
                with suppress(StorageError):
                    self.storage.remove(name)
            # The run may remove an old checkpoint meanwhile: a manifest without its other files must not be copied.
            elif not (name.endswith(MANIFEST) and name.rpartition("/")[0] in lost):
                try:
                    current = stamp(self.directory / name)
                    if name not in copied or self.copied.get(name) != current:
                        # Checkpoints share files.
                        same = next((other for other in copied if self.copied.get(other) == current), None)
                        if same is None:
                            self.storage.put(name, self.directory / name)
                        else:
                            self.storage.copy(same, name)
                        self.copied[name] = current
                except FileNotFoundError:
                    lost.add(name.rpartition("/")[0])

    def is_behind(self) -> bool:
        """Whether the copy lacks a file, or has not come as far as the run."""
        copied, here = self._there(), set(own_files(self.directory))
        return not here <= copied or reached(copied) != reached(here)

    def clear(self) -> None:
        """Remove the run from the storage, its experiment first, so that a part of a run is not a run."""
        for name in sorted(self._there(), key=lambda name: name != EXPERIMENT):
            self.storage.remove(name)

    def _there(self) -> set[str]:
        """The run's files in the storage."""
        return {name for name in self.storage.files() if is_own_file(name)}


def _step(name: str, gone: bool) -> int:
    """The place of a file in the order of copying or, if it is `gone` here, of removing.

    The experiment is copied after its own files, then records, checkpoints, and their manifests. Records are removed
    before checkpoints are copied, because a finished table would be read instead of the newer stream. All other
    files are removed at the end, manifests first.
    """
    part = MANIFEST if round_of(name) is not None else name.partition("/")[0]
    if gone:
        return {"records": 3, MANIFEST: 6}.get(part, 7)
    return {EXPERIMENT: 1, "records": 2, CHECKPOINTS: 4, MANIFEST: 5}.get(part, 0)


@contextmanager
def mirrored(directory: Path, storage: Storage) -> Iterator[Callable[[], None]]:
    """Context manager: copy the run in `directory` at its end, even if the block fails; yields what copies meanwhile.

    The function is called after each round, and copies the run if the round has left a new checkpoint. Raise DiskError
    if the copying at the end fails; if the block has failed too, only log it.
    """
    copies = Copies(directory, storage)
    last = None

    def round_done() -> None:
        nonlocal last
        newest = max(checkpoints(directory), default=None)
        if newest == last:
            return
        last = newest
        try:
            copies.update()
        except OSError as error:
            log.warning(
                "%s cannot be written to (%s): the run continues in %s, and copying is tried again at the next "
                "checkpoint",
                storage.url,
                error,
                directory,
            )

    try:
        yield round_done
    except Exception:
        if refusal := _refusal(copies):
            log.warning("%s", refusal)
        raise
    if refusal := _refusal(copies):
        raise refusal


def _refusal(copies: Copies) -> DiskError | None:
    """Copy the run a last time. Return the error if that fails."""
    try:
        copies.update()
    except OSError as error:
        return DiskError(
            f"{copies.storage.url} cannot be written to ({error}), so the newest results are only in "
            f"{copies.directory}: when it can be written to again, copy them with: rayfl resume {copies.directory}"
        )
    return None


def fetch(storage: Storage, directory: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Download a run into an empty or missing directory, its experiment last.

    `leave_out`: files whose paths begin with one of these are not fetched. Raise RayflError if there is no run,
    StorageError if reading fails, DiskError if writing fails.
    """
    names = [name for name in storage.files() if is_own_file(name) and not name.startswith(leave_out)]
    if EXPERIMENT not in names:
        raise RayflError(f"{storage.url} holds no run ({EXPERIMENT} is missing there): name the folder of a run")
    for name in sorted(names, key=lambda name: name == EXPERIMENT):
        path = directory / name
        with writing(directory, "try again"):
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.fetch(name, path)


def fetch_newer(storage: Storage, directory: Path, require_same: Callable[[Path, Path], object]) -> bool:
    """Replace the run in `directory` by its copy in a storage if the copy is ahead; returns whether it was.

    `require_same(directory, fetched)` raises if another run lies in `directory`, which then stays as it is. Errors are
    those of `fetch`.
    """
    ahead, here = reached(storage.files()), reached(list(own_files(directory)))
    if ahead is None or (here is not None and here >= ahead):
        return False
    if here is None and (directory / "records").exists():
        raise RayflError(f"{directory} is a run that lost its {EXPERIMENT}: restore it, or move it away")
    with writing(directory, "try again"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        # A folder beside it, from which the run takes its place when it is complete.
        with tempfile.TemporaryDirectory(suffix=".fetched", dir=directory.parent) as beside:
            partial = Path(beside, directory.name)
            fetch(storage, partial)
            if here is not None:
                require_same(directory, partial)
            if directory.exists():
                require_own_entries(directory)
                with locked(directory):
                    remove_entries(directory)
                    (directory / LOCK).unlink(missing_ok=True)
            partial.replace(directory)
            sync_directory(directory.parent)
    return True


def copy_for_reading(url: str, leave_out: tuple[str, ...] = ("checkpoints/",)) -> Path:
    """Download the run at a URL to a temporary directory, which is removed when this process ends.

    Raise RayflError if it cannot be read, DiskError if writing fails.
    """
    home = Path(tempfile.mkdtemp(prefix="rayfl-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    directory = home / url.partition("?")[0].rstrip("/").rpartition("/")[2]
    with opened(url) as storage:
        fetch(storage, directory, leave_out)
    return directory
