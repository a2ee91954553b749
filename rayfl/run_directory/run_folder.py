"""The place of a run: a directory of this machine, and its copy in object storage if `output.directory` is a URL."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.run_directory.copies import Copies, mirrored
from rayfl.run_directory.description import EXPERIMENT, is_left_over, is_run
from rayfl.run_directory.disk import LOCK, DiskError, locked
from rayfl.run_directory.object_storage import Storage, StorageError, below, is_url, opened, parted
from rayfl.run_directory.run_files import remove_entries, require_own_entries
from rayfl.run_directory.tables import read_records

LOCAL = Path("runs")
"""The folder on this machine of the runs whose `output.directory` is a URL."""


@dataclass(frozen=True)
class RunFolder:
    """The place of one run: `directory` on this machine; `output`: the `output.directory` of its experiment."""

    directory: Path
    output: str

    @classmethod
    def at(cls, place: Path | str, output: str) -> "RunFolder":
        """The folder of the run at `place`, a directory or the URL of a copy. A URL also gives `output`."""
        if isinstance(place, str):
            output, name = parted(place)
            place = LOCAL / name
        return cls(place.absolute(), output)

    @classmethod
    def named(cls, name: str, output: str) -> "RunFolder":
        """The folder of the run of this name in an `output.directory`."""
        return cls.at((LOCAL if is_url(output) else Path(output)) / name, output)

    @property
    def url(self) -> str | None:
        """The URL of the copy; None if there is none."""
        return below(self.output, self.directory.name) if is_url(self.output) else None

    def next_free(self) -> "RunFolder":
        """This folder if nothing is there, here or in the storage; else the first free one of NAME-2, NAME-3, ..."""
        number, folder = 1, self
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
        """Copy the run to its storage, if it has one, while the `with` block runs, and at its end; see
        copies.mirrored."""
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
    found = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if EXPERIMENT in found:
        if not overwrite:
            raise RayflError(f"{path} holds a run: name another directory, or give --overwrite")
    elif "records" in found:
        raise RayflError(f"{path} is a run that lost its {EXPERIMENT}: restore it, or name another directory")
    elif foreign := [name for name in found if not is_left_over(name)]:
        raise RayflError(
            f"{path} is not empty and holds something other than a run ({foreign[0]}), which rayfl never deletes: name "
            "another directory"
        )
    require_own_entries(path)
    return bool(found)
