"""The folders of checkpoints. They load no torch: lists of runs and copies need them.

A checkpoint is written under another name, synced, and renamed, so that it exists as a whole or not at all. The
checkpoint before it is kept, in case the newest gets damaged.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.run_directory.disk import RunFiles, sync_directory

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATES = r"(server|(states|memories|messages|models|begun)-[0-9]{4,})\.safetensors"
"""The files of states in a checkpoint."""
_CHECKPOINT = r"checkpoints/[0-9]{8,}(\.partial)?"
PART = RunFiles(
    (rf"{_CHECKPOINT}/manifest\.json", rf"{_CHECKPOINT}/{STATES}"),
    {"`checkpoints/`": "the states from which the run resumes; the name of a folder is the number of rounds before it"},
)
_KEPT = 2


class DamagedFile(RayflError):
    """A file of a checkpoint is not what was written."""


def round_of(name: str) -> int | None:
    """The rounds before the checkpoint whose manifest is the file `name` of a run directory; None for other files."""
    match = re.fullmatch(rf"{FOLDER}/([0-9]+)/{re.escape(MANIFEST)}", name)
    return int(match[1]) if match else None


def checkpoints(directory: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by the number of rounds before them, newest first; their content is not
    checked."""
    home = directory / FOLDER
    paths = [path for path in home.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name)] if home.is_dir() else []
    return {int(path.name): path for path in sorted(paths, key=lambda path: int(path.name), reverse=True)}


@contextmanager
def new_checkpoint(directory: Path, round_number: int) -> Iterator[Path]:
    """Yield the folder for the files of the checkpoint before `round_number`; after the block it is in its place.

    If the block raises, or writing fails (OSError), the earlier checkpoints are as they were.
    """
    home = directory / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{round_number:08d}"
    before = checkpoints(directory)
    # A run that resumed from an earlier checkpoint cannot use the later ones.
    kept = [path for earlier, path in before.items() if earlier < round_number][: _KEPT - 1]
    partial = home / f"{folder.name}.partial"
    for left in (*home.glob("*.partial"), folder):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(home)
    for old in {*before.values()} - {folder, *kept}:
        shutil.rmtree(old, ignore_errors=True)
