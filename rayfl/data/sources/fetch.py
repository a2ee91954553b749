"""Where the files of a dataset come from: torchvision's classes download some, the others the user fetches."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from rayfl.data.datasets import Source
from rayfl.data.torchvision import torchvision
from rayfl.settings import SettingsError


class Fetched(Source):
    """A dataset whose files the user fetches: they lie in `root`, or in `cache`/NAME where no root is given."""

    root: Path | None = Field(default=None, strict=False)
    cache: Path = Field(default=Path("~/.cache/rayfl"), strict=False)

    advice: ClassVar[str]
    """Advice on the files to fetch, as the middle of a sentence: "fetch ... and unpack it"."""

    def folder(self) -> Path:
        """Where the files lie. SettingsError with what to fetch and where to put it if there is no such folder."""
        folder = (self.root or self.cache / self.name).expanduser()
        if not folder.is_dir():
            raise self.missing(f"there is no folder {folder}")
        return folder

    def missing(self, reason: str) -> SettingsError:
        """The error for missing files; `reason` says which are missing."""
        place = f"its files belong into {(self.root or self.cache / self.name).expanduser()} or where data.root says"
        return SettingsError(f"{self.name} is not on this machine ({reason}): {self.advice}; {place}")


def download(name: str, kind: str, cache: Path, advice: str, **options: object) -> None:
    """Let torchvision's class `kind` download into `cache` what is not there yet.

    SettingsError that ends with `advice` where that is impossible.
    """
    try:
        getattr(torchvision().datasets, kind)(cache.expanduser(), download=True, **options)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise SettingsError(f"{name} is not on this machine and cannot be downloaded ({reason}): {advice}") from None
