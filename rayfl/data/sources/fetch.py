"""Finds the files of a dataset: torchvision's classes download some, and the user fetches the others."""

import zlib
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError
from typing import Annotated, ClassVar
from zipfile import BadZipFile

from pydantic import Field

from rayfl.data.datasets import Source
from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded

Root = Annotated[Path | None, Field(strict=False, description="folder of the files; default: downloaded to cache")]
Cache = Annotated[Path, Field(strict=False, description="folder of downloads and of decoded arrays")]
CACHE = Path("~/.cache/rayfl")


class Fetched(Source):
    """A dataset whose files the user fetches: they lie in `root`, or in `cache`/NAME if no root is given."""

    root: Path | None = Field(default=None, strict=False, description="folder of the files; default: CACHE/NAME")
    cache: Cache = CACHE

    advice: ClassVar[str]
    """Advice on the files to fetch, as the middle of a sentence: "fetch ... and unpack it"."""

    def folder(self) -> Path:
        """The folder of the files. If it does not exist, RayflError says what to fetch and where to put it."""
        folder = expanded(self.root or self.cache / self.name)
        if not folder.is_dir():
            raise self.missing(f"there is no folder {folder}")
        return folder

    def missing(self, reason: str) -> RayflError:
        """The error for files that are missing or damaged; `reason` says which."""
        folder = expanded(self.root or self.cache / self.name)
        what = "is incomplete or damaged" if folder.is_dir() else "is not on this machine"
        place = f"its files belong into {folder} or where data.root says"
        return RayflError(f"{self.name} {what} ({reason}): {self.advice}; {place}")


def download(name: str, kind: str, cache: Path, advice: str, **options: object) -> None:
    """Let torchvision's class `kind` download the missing files into `cache`.

    If that fails, RayflError ends with `advice`.
    """
    try:
        getattr(torchvision().datasets, kind)(expanded(cache), download=True, **options)
    except (OSError, RuntimeError, HTTPException, EOFError, zlib.error, BadZipFile, TarError) as error:
        reason = str(error).partition("\n")[0].rstrip(":.") or type(error).__name__
        if "corrupted" in str(error):
            # torchvision's word for a file whose checksum is not the published one.
            reason = "what came is not the published file: its checksum is another"
        raise RayflError(f"{name} is not on this machine and cannot be downloaded ({reason}): {advice}") from None
