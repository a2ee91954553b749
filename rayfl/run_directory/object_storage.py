"""Object storage: the folder at a URL such as s3://bucket/experiments, through pyarrow.

Options are in the URL's query, as pyarrow takes them (s3://bucket/runs?endpoint_override=host:9000&scheme=http). Keys
of accounts are in the environment only, because a URL is written into the run directory.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from rayfl.errors import RayflError, reason, refuse_if
from rayfl.run_directory.disk import DiskError
from rayfl.settings import shown
from rayfl.untyped import Foreign

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
"""Storages in which a file appears when it is closed, and folders need not be made."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/:]|data:[^/]*,")
"""A scheme and a slash; simplecache::s3://bucket/folder and data:,content are URLs too, which are refused."""
_SECRET = re.compile(r"secret|token|password|key", re.IGNORECASE)
REQUEST_S = 10.0
"""Seconds in which S3 must connect, and in which it may send nothing, until a request fails; each has three tries."""
_PIECE_BYTES = 8 << 20
_LONGEST = 200
"""The number of letters of a library's error that are shown."""


class StorageError(DiskError):
    """A storage could not be read or written to; the message says why."""


def is_url(text: str) -> bool:
    """Whether a text is a URL rather than a path of this machine, even if a `Path` has removed one of its slashes."""
    return bool(_URL.match(text))


def require_path(text: str) -> None:
    """Raise RayflError for a URL where only a path of this machine is allowed."""
    if is_url(text):
        raise RayflError(f"{text} is a URL; give a path on this machine")


def require_url(url: str) -> None:
    """Raise RayflError unless a URL names a folder in a storage that can be used here. The storage is not asked."""
    parts = urlsplit(url)
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    is_whole = url.startswith(f"{parts.scheme}://") and parts.netloc
    mistakes = [
        (
            parts.password is not None or any(_SECRET.search(name) for name in names),
            f"a URL of {parts.scheme} may hold no key or password, since it is written into the run directory: put "
            "them into the environment (of S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
        ),
        (
            parts.scheme not in _SCHEMES,
            f"{shown(url)}: no run can be kept in {parts.scheme}://; known are s3, gs and abfs, and a folder of this "
            "machine is given as its path",
        ),
        (
            "tls_verify_certificates" in names,
            f"{shown(url)}: certificates are always verified; give tls_ca_file_path=FILE with your own",
        ),
        (
            not is_whole or parts.fragment or "::" in url or ".." in parts.path.split("/"),
            f"{shown(url)} names no folder of a bucket: write it as s3://bucket/folder",
        ),
    ]
    refuse_if((is_wrong, "", words) for is_wrong, words in mistakes)


def below(url: str, name: str) -> str:
    """The URL of `name` in the folder of a URL, with its options."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def parted(url: str) -> tuple[str, str]:
    """The URL of the folder in which a run lies, and the run's name there.

    Raise RayflError if it names only a bucket.
    """
    require_url(url)
    parts = urlsplit(url)
    folder, _, name = parts.path.rstrip("/").rpartition("/")
    if not name:
        raise RayflError(f"{url} is a bucket: name the run in it, as {below(url, 'NAME')}")
    return urlunsplit(parts._replace(path=folder)), name


class Storage:
    """The folder at a URL. Every method raises StorageError if it fails."""

    def __init__(self, url: str) -> None:
        """Open the folder. Raise RayflError as `require_url` does."""
        from pyarrow.fs import FileSystem

        require_url(url)
        self.url = url
        parts = urlsplit(url)
        if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
            # pyarrow's limit is fifteen minutes, for which a run without credentials would print nothing.
            parts = parts._replace(query="&".join(filter(None, (parts.query, "retry_limit_seconds=60"))))
        with self._refusals():
            self._files, path = FileSystem.from_uri(urlunsplit(parts))
            if parts.scheme == "s3":
                self._files = _limited(self._files)
        self._path = path.rstrip("/")

    def files(self) -> set[str]:
        """The paths of all files in the folder, at any depth, below it."""
        from pyarrow.fs import FileSelector, FileType

        with self._refusals():
            infos = self._files.get_file_info(FileSelector(self._path, allow_not_found=True, recursive=True))
        folder = f"{self._path.lstrip('/')}/"
        return {info.path.lstrip("/").removeprefix(folder) for info in infos if info.type == FileType.File}

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of a file, in pieces."""
        with self._refusals(), self._files.open_input_stream(self._at(name)) as source:
            while piece := source.read(_PIECE_BYTES):
                yield piece

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file of the storage to `path`. Raise OSError if writing fails."""
        with open(path, "wb") as target:
            target.writelines(self.pieces(name))

    def put(self, name: str, path: Path) -> None:
        """Copy a file to the storage, where it appears whole or not at all.

        Raise OSError if writing fails.
        """
        with open(path, "rb") as source, self._refusals(), self._files.open_output_stream(self._at(name)) as target:
            shutil.copyfileobj(source, target, _PIECE_BYTES)

    def copy(self, name: str, new: str) -> None:
        """Copy a file of the storage to another name there, without bytes that leave the storage."""
        with self._refusals():
            self._files.copy_file(self._at(name), self._at(new))

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with self._refusals(), suppress(FileNotFoundError):
            self._files.delete_file(self._at(name))

    def require_writable(self) -> None:
        """Raise RayflError unless a run can be copied to the folder."""
        name = ".rayfl-write-test.partial"
        try:
            self.put(name, Path(os.devnull))
        except StorageError as error:
            raise RayflError(
                f"{self.url} cannot be written to ({error}): check the address, make the bucket, give an account that "
                "may write there, or name another place in output.directory"
            ) from None
        # An account may be allowed to write and not to delete.
        with suppress(StorageError):
            self.remove(name)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn any error that a library raises into a StorageError."""
        try:
            yield
        except StorageError:
            raise
        # pyarrow raises OSError and errors of its own.
        except Exception as error:
            raise StorageError(_words(error)) from error


def _limited(files: Foreign) -> Foreign:
    """The same S3 with limits of time, which a URL cannot have: pyarrow's own are 31 tries of a request."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    # What pickle would keep. Accounts found in the environment are not among these options.
    _, (options,) = files.__reduce__()
    limits = {"connect_timeout": REQUEST_S, "request_timeout": REQUEST_S}
    return S3FileSystem(**{**options, **limits, "retry_strategy": AwsStandardS3RetryStrategy(max_attempts=3)})


@contextmanager
def opened(url: str) -> Iterator[Storage]:
    """Yield the storage at a URL. Turn a StorageError in the block into RayflError: the user can change the URL."""
    try:
        yield Storage(url)
    except StorageError as error:
        raise RayflError(
            f"{url} cannot be read ({error}): check the address and the account, or name another place"
        ) from None


def _words(error: Exception) -> str:
    """The error of a library in one short line."""
    if isinstance(error, OSError) and error.errno:
        return reason(error)
    # AWS's library repeats the request, then says: AWS Error ACCESS_DENIED during X operation: Why (Request ID: Z).
    text = re.sub(r"^.*AWS Error ([A-Z_]+).*? during (\w+) operation:?(.*? Message:)?", r"\1 in \2:", str(error))
    words = text.partition("(Request ID")[0].split()
    return " ".join(words).strip(" .:")[:_LONGEST] or type(error).__name__
