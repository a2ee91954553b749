"""The folders of checkpoints, and their manifests: which files belong to a checkpoint, and what is in them.

A checkpoint is written under another name, synced, and renamed, so that it exists as a whole or not at all. The
checkpoint before it is kept, in case the newest gets damaged.

checkpoints/00000040/            before round 40, that is, after 40 rounds
    manifest.json                format, version, digest of the experiment, round, rows on record, numbers of
                                 states, size and SHA-256 of every other file, and its own SHA-256
    server.safetensors           the server's state, and that of the selection if it has one
    states-0000.safetensors ...  client states
    memories-0000.safetensors    what the server keeps of clients

A file of states that have hardly changed is a hard link to that of the checkpoint before. Of a client's states in
several files that in the file with the highest number counts.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_json
from rayfl.limits.regular_files import require_regular
from rayfl.run_directory.disk import Part, sync_directory, write_json
from rayfl.settings import Settings, shown
from rayfl.version import __version__

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
SERVER = "server.safetensors"
_CHECKPOINT, _STATES = r"checkpoints/[0-9]{8,}(\.partial)?", r"(server|(states|memories)-[0-9]{4,})\.safetensors"
PART = Part(
    (rf"{_CHECKPOINT}/manifest\.json", rf"{_CHECKPOINT}/{_STATES}"),
    {"`checkpoints/`": "the states from which the run resumes; the name of a folder is the number of rounds before it"},
)
FORMAT = 5
_KEPT = 2
_CHECKSUM = "sha256"


class DamagedFile(RayflError):
    """A file of a checkpoint is not what was written."""


class File(Settings):
    """Size and digest of a file."""

    bytes: int = Field(ge=0)
    sha256: str


class Manifest(Settings):
    """The content of a manifest."""

    format: int
    rayfl: str
    identity: str = Field(description="digest of what decides the run's numbers, see rayfl.experiment.identity")
    round: int = Field(ge=0)
    rows: Mapping[str, int]
    states: int = Field(ge=0, description="clients that have a state")
    memories: int = Field(ge=0, description="clients for which the server has a memory")
    files: Mapping[Annotated[str, Field(pattern=rf"^{_STATES}$")], File]


def round_of(name: str) -> int | None:
    """The rounds before the checkpoint whose manifest is the file `name` of a run directory; None for other files."""
    found = re.fullmatch(rf"{FOLDER}/([0-9]+)/{re.escape(MANIFEST)}", name)
    return int(found[1]) if found else None


def checkpoints(directory: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by the number of rounds before them, newest first; their content is not
    checked."""
    home = directory / FOLDER
    found = [path for path in home.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name)] if home.is_dir() else []
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name), reverse=True)}


@contextmanager
def new_checkpoint(directory: Path, round: int) -> Iterator[Path]:
    """Yield the folder for the files of the checkpoint before `round`; after the block the checkpoint is in its place.

    If the block raises, or writing fails (OSError), the earlier checkpoints are as they were.
    """
    home = directory / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    place = home / f"{round:08d}"
    before = checkpoints(directory)
    # A run that resumed from an earlier checkpoint cannot use the later ones.
    kept = [place for earlier, place in before.items() if earlier < round][: _KEPT - 1]
    partial = home / f"{place.name}.partial"
    for left in (*home.glob("*.partial"), place):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(home)
    for old in {*before.values()} - {place, *kept}:
        shutil.rmtree(old, ignore_errors=True)


def write_manifest(
    place: Path,
    names: Collection[str],
    known: Mapping[str, File],
    *,
    identity: str,
    round: int,
    rows: Mapping[str, int],
    states: int,
    memories: int,
) -> Manifest:
    """Sync the files of a checkpoint, then write and return its manifest. Raise OSError if writing fails.

    `known`: size and digest of files that lay in the checkpoint before.
    """
    found = {name: known[name] for name in names if name in known}
    for name in {*names} - {*found}:
        with open(place / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found[name] = File(bytes=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
            os.fsync(file.fileno())
    manifest = Manifest(
        format=FORMAT,
        rayfl=__version__,
        identity=identity,
        round=round,
        rows=rows,
        states=states,
        memories=memories,
        files=found,
    )
    about = manifest.model_dump(mode="json")
    write_json(place / MANIFEST, {**about, _CHECKSUM: _checksum(about)})
    return manifest


# Any: JSON.
def _checksum(about: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum; spaces and the order of keys do not change it."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def read_manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were written.

    Raise DamagedFile if they are not; another RayflError if the manifest has another format.
    """
    try:
        about = dict(read_json(place / MANIFEST))
        if about.pop(_CHECKSUM, None) != _checksum(about):
            raise DamagedFile("it is not what was written")
    except (OSError, ValueError) as error:
        raise DamagedFile(f"its manifest cannot be read: {error}") from None
    if about.get("format") != FORMAT:
        raise RayflError(
            f"checkpoint {place} has format {shown(about.get('format'))}, written by rayfl {about.get('rayfl')}; this "
            f"is rayfl {__version__}, which reads format {FORMAT}: resume it with the version that wrote it"
        )
    try:
        manifest = Manifest(**about)
    except ValueError as error:
        raise DamagedFile(f"its manifest is not valid: {error}") from None
    if manifest.round != int(place.name):
        raise DamagedFile(f"its manifest is of round {manifest.round}")
    if SERVER not in manifest.files:
        raise DamagedFile(f"its manifest lacks {SERVER}")
    for name, file in manifest.files.items():
        try:
            require_regular(place / name)
            with open(place / name, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                found = hashlib.file_digest(stream, "sha256").hexdigest() if size == file.bytes else None
        except OSError as error:
            raise DamagedFile(f"{name} cannot be read: {reason(error)}") from None
        if found != file.sha256:
            raise DamagedFile(f"{name} is not what was written")
    return manifest
