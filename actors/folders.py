"""Ray's folders: a private one for a session's files, and the one of a submitted job, which Ray soon deletes.

Ray makes its own folders writable by everybody, so that another user could replace a file that Ray writes, or listen
in place of its object store. A Ray that rayfl starts therefore has its folders inside a `PrivateFolder`, and so has
the fork server.

A process holds a lock on its private folder as long as it lives. So the next start can tell which folders belong to
killed processes, and removes them. Imports the standard library alone.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

BASE = "RAY_TMPDIR"
"""The environment variable that names the folder for Ray's folders. Otherwise it is TMPDIR, /tmp or /var/tmp."""

RAYS = "ray"
"""The name that Ray gives to its folder inside `BASE`."""

_PREFIX = "rayfl-"
_HOST = "host"
"""The file with the name of the machine. Machines may share a folder in which the locks of one do not hold for the
others."""

_LONGEST_PATH = 107
"""The most bytes of the path of a socket: sockaddr_un holds 108, and the last one is 0."""
_PATH_INSIDE = f"/{_PREFIX}12345678/{RAYS}/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
"""The longest path of a socket of Ray's inside a base."""


class PrivateFolder:
    """A new folder of mode 0700 in the first suitable base. `remove` deletes it.

    Also delete the folders of killed processes of this user on this machine. A base is suitable if it is short enough
    for Ray's sockets and keeps owners and modes. Raise OSError if no base can hold the folder.
    """

    def __init__(self) -> None:
        refused: list[OSError] = []
        for base in _bases():
            try:
                self.path = _made(base)
                break
            except OSError as error:
                refused.append(error)
        else:
            raise refused[0]
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        # Some file systems have no locks; then nobody takes this folder for that of a killed process.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        Path(self.path, _HOST).write_text(socket.gethostname(), encoding="utf-8")

    def remove(self) -> None:
        """Delete the folder. If a process still writes to it, the next start deletes it."""
        _remove(self.path)
        os.close(self._lock)


def _bases() -> list[str]:
    """The folders that may hold a private folder, the preferred one first, without symbolic links."""
    given = os.environ.get(BASE)
    bases = [given] if given else [os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]
    return list(dict.fromkeys(os.path.realpath(base) for base in bases))


def _made(base: str) -> str:
    """Make a folder that is this user's alone. Raise OSError if `base` is too long for Ray's sockets, or if its file
    system does not keep owners and modes."""
    if len(os.fsencode(base)) + len(_PATH_INSIDE) > _LONGEST_PATH:
        raise OSError(f"the path of {base} is too long for the sockets of Ray")
    _remove_stale(base)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    status = os.lstat(folder)
    if (status.st_uid, stat.S_IMODE(status.st_mode)) != (os.geteuid(), stat.S_IRWXU):
        os.rmdir(folder)
        raise OSError(f"{base} cannot hold a folder that is private to its user")
    return folder


def _remove_stale(base: str) -> None:
    """Delete the private folders in `base` whose processes were killed on this machine."""
    for folder in Path(base).glob(f"{_PREFIX}*"):
        # Only if a process of this user on this machine made it.
        with suppress(OSError, ValueError):
            if folder.lstat().st_uid == os.geteuid() and (folder / _HOST).read_text("utf-8") == socket.gethostname():
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(folder))
                finally:
                    os.close(lock)


def _remove(folder: str) -> None:
    """Delete a folder. If something in Ray's own folder stays, keep the file by which the next start finds it."""
    rays = Path(folder, RAYS)
    shutil.rmtree(rays, ignore_errors=True)
    if not rays.exists():
        shutil.rmtree(folder, ignore_errors=True)


_FOLDER = ("runtime_resources", "working_dir_files")
"""The path of such folders inside a session's directory."""


def warning_of_deletion(directory: Path) -> str | None:
    """A warning for the user if Ray will delete `directory`; None if it will not."""
    parts = Path(os.path.realpath(directory)).parts
    if not any(parts[index : index + 2] == _FOLDER for index in range(len(parts))):
        return None
    return (
        f"{directory} lies in the copy of the working directory that Ray unpacked for this job, which is deleted with "
        "the cluster or earlier: to keep results, give --output or output.directory an absolute path on permanent "
        "storage, or copy them before that"
    )
