"""Finds the files of a dataset: torchvision's classes download some, and the user fetches the others."""

import zlib
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError
from typing import Annotated, ClassVar
from zipfile import BadZipFile

from rayfl.data.datasets import Field, RayflError, Source
from rayfl.data.torchvision import torchvision
from rayfl.limits.regular_files import expanded

Cache = Annotated[Path, Field(strict=False, description="folder of downloads and of decoded arrays")]
CACHE = Path("~/.cache/rayfl")


class Downloaded(Source):
    """A dataset whose files lie in `root`; without a root torchvision's class `kind` downloads them to `cache`."""

    root: Path | None = Field(
        default=None, strict=False, description="folder of the files; default: downloaded to cache"
    )
    cache: Cache = CACHE

    kind: ClassVar[str]

    def fetch(self, advice: str, *inside: str, **options: object) -> Path:
        """The folder of the files: `root`, or the folder `inside` the cache in which torchvision's class has put them.

        options: arguments of torchvision's class. If a download fails, RayflError ends with `advice`.
        """
        if self.root is not None:
            return expanded(self.root)
        cache = expanded(self.cache)
        try:
            getattr(torchvision().datasets, self.kind)(cache, download=True, **options)
        except (OSError, RuntimeError, HTTPException, EOFError, zlib.error, BadZipFile, TarError) as error:
            reason = str(error).partition("\n")[0].rstrip(":.") or type(error).__name__
            if "corrupted" in str(error):
                # torchvision's word for a file whose checksum is not the published one.
                reason = "the download is not the published file: its checksum differs"
            raise RayflError(
                f"{self.name} is not on this machine and cannot be downloaded ({reason}): {advice}"
            ) from None
        return cache.joinpath(*inside)


class Fetched(Source):
    """A dataset whose files the user fetches: they lie in `root`, or in `cache`/NAME if no root is given."""

    root: Path | None = Field(default=None, strict=False, description="folder of the files; default: CACHE/NAME")
    cache: Cache = CACHE

    advice: ClassVar[str]
    """Advice on the files to fetch, as the middle of a sentence: "fetch ... and unpack it"."""

    @property
    def folder(self) -> Path:
        """The folder of the files, which may not exist."""
        return expanded(self.root or self.cache / self.name)

    def missing(self, reason: str) -> RayflError:
        """The error for files that are missing or damaged; `reason` says which."""
        what = "is incomplete or damaged" if self.folder.is_dir() else "is not on this machine"
        return RayflError(
            f"{self.name} {what} ({reason}): {self.advice}; put its files into {self.folder}, or set data.root to "
            "their folder"
        )
