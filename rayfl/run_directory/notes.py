"""The note and the tags that a user gives to a run. No number depends on them; a copy and a resumed run keep them."""

from pathlib import Path

from rayfl.errors import RayflError
from rayfl.limits.json_files import read_json
from rayfl.run_directory.disk import RunFiles, write_json
from rayfl.settings import Settings

PART = RunFiles((r"notes\.json",), {"`notes.json`": "the note and the tags that `rayfl note` gave to the run"})
_NAME = "notes.json"


class Notes(Settings):
    """A sentence about a run, and words by which it is found."""

    note: str = ""
    tags: tuple[str, ...] = ()


def read_notes(directory: Path) -> Notes:
    """The note and tags of a run; empty if it has none, or if they cannot be read."""
    try:
        return Notes(**read_json(directory / _NAME))
    except (OSError, ValueError, TypeError):
        return Notes()


def write_notes(directory: Path, notes: Notes) -> None:
    """Give a run a note and tags. Raise OSError if writing fails, RayflError for a tag that could not be searched."""
    if wrong := [tag for tag in notes.tags if not tag or any(letter in tag for letter in ", =")]:
        raise RayflError(f"tag {wrong[0]!r} is not allowed; use letters without spaces, commas and '='")
    write_json(directory / _NAME, notes.model_dump(mode="json"))
