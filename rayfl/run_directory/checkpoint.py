"""Checkpoints: the states from which a run resumes after any stop, on disk in whole or not at all.

    checkpoints/00000040/            before round 40, that is, after 40 rounds
        manifest.json                format, versions, round, rows on record, and size and SHA-256 of every other file
        server.safetensors           the server's state
        states-0000.safetensors ...  client states, memories-0000.safetensors ... what the server keeps of clients

A checkpoint is written beside its place, synced, and renamed; the one before is kept, in case this one gets damaged.
Client states pass through memory a few at a time.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

import rayfl
from rayfl import tree
from rayfl.rounds.executor import Executor, Ref
from rayfl.rounds.rounds import RunState
from rayfl.run_directory.atomic_files import sync_directory, write_json
from rayfl.run_directory.state_files import DamagedFile, load_states, open_handles, save_states
from rayfl.settings import Settings, SettingsError
from rayfl.tree import Arrays

log = logging.getLogger("rayfl")

FORMAT = 3
FILE_BYTES = 64 << 20
"""A file of states is closed when it is larger."""
KEPT = 2
MANIFEST = "manifest.json"


class Checkpoints(Settings):
    """The `[checkpoint]` table."""

    every: int = Field(default=10, ge=0, description="save after every so many rounds and at the end; 0: never")

    def due(self, num_done: int, last: bool) -> bool:
        """Whether to save after `num_done` rounds."""
        return self.every > 0 and (last or num_done % self.every == 0)


def save(directory: Path, run_state: RunState, executor: Executor, num_rows: Mapping[str, int] | None = None) -> Path:
    """Write a checkpoint of `run_state` into a run directory; returns its place.

    `num_rows`: the rows of each table of the records so far, without which the checkpoint would be of no use. OSError
    where the disk refuses; then the checkpoints before are as they were.
    """
    home = directory / "checkpoints"
    home.mkdir(parents=True, exist_ok=True)
    place = home / f"{run_state.round:08d}"
    partial = home / f"{place.name}.partial"
    for left in (*home.glob("*.partial"), place):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        _fill(partial, run_state, executor, num_rows or {})
        os.replace(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(home)
    # Later ones are of no use to a run that came back to here without them.
    kept = [one for one in _places(directory) if int(one.name) <= run_state.round][:KEPT]
    for old in set(_places(directory)) - set(kept):
        shutil.rmtree(old, ignore_errors=True)
    return place


def load(
    directory: Path, executor: Executor, rows: Callable[[int], Mapping[str, int]] | None = None
) -> RunState | None:
    """The newest whole checkpoint of a run that its records reach; None where there is none.

    `rows` gives how many rows each table of the records has after a number of rounds; None: take the records for
    whole. A checkpoint that is passed over is logged. SettingsError for a checkpoint of another format.
    """
    for place in _places(directory):
        try:
            about = _manifest(place)
            if rows is None or _reached(about, rows):
                return _read(place, about, executor)
            log.warning("the records before checkpoint %s are not all there; the one before it is used", place.name)
        except DamagedFile as error:
            log.warning("checkpoint %s is damaged (%s); the one before it is used", place.name, error)
    return None


# Any: a manifest, as JSON has it.
def _reached(about: Mapping[str, Any], rows: Callable[[int], Mapping[str, int]]) -> bool:
    """Whether the records are those that were there when the checkpoint was written."""
    found = rows(about["round"])
    return found["rounds"] == about["round"] and all(found.get(name) == count for name, count in about["rows"].items())


def rounds_saved(directory: Path) -> list[int]:
    """The numbers of rounds after which there are checkpoints, newest first; they are not checked."""
    return [int(place.name) for place in _places(directory)]


def _places(directory: Path) -> list[Path]:
    home = directory / "checkpoints"
    found = [path for path in home.iterdir() if re.fullmatch(r"\d{8,}", path.name)] if home.is_dir() else []
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _fill(place: Path, run_state: RunState, executor: Executor, num_rows: Mapping[str, int]) -> None:
    """Write all files of a checkpoint, the manifest last."""
    written = [place / "server.safetensors"]
    save_states(written[0], {"server": tree.to_arrays(run_state.server)})
    for kind, refs in (("states", run_state.states), ("memories", run_state.server_memories)):
        for number, states in enumerate(_batches(refs, executor)):
            written.append(place / f"{kind}-{number:04d}.safetensors")
            save_states(written[-1], states)
    files = {}
    for path in written:
        with open(path, "rb") as file:
            files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            os.fsync(file.fileno())
    written_by = {"format": FORMAT, "rayfl": rayfl.__version__}
    write_json(place / MANIFEST, {**written_by, "round": run_state.round, "rows": dict(num_rows), "files": files})


def _batches(refs: Mapping[int, Ref], executor: Executor) -> Iterator[dict[str, Arrays]]:
    """States by client, as many at a time as fill a file."""
    batch: dict[str, Arrays] = {}
    size = 0
    for client in sorted(refs):
        state = executor.get(refs[client])
        batch[str(client)] = state
        size += tree.num_bytes(state)
        if size >= FILE_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


# Any: JSON.
def _manifest(place: Path) -> dict[str, Any]:
    """The contents of the manifest. DamagedFile for one that cannot be read, SettingsError for another format."""
    try:
        about = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise SettingsError(
                f"checkpoint {place} has format {about['format']!r}, written by rayfl {about['rayfl']}; this is rayfl "
                f"{rayfl.__version__}, which reads format {FORMAT}: resume it with the version that wrote it"
            )
        if about["round"] != int(place.name):
            raise ValueError(f"it is that of round {about['round']}")
        return {"round": about["round"], "rows": dict(about.get("rows", {})), "files": dict(about["files"])}
    except SettingsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"its manifest cannot be read: {error}") from None


# Any: a manifest.
def _read(place: Path, about: Mapping[str, Any], executor: Executor) -> RunState:
    round, files = about["round"], about["files"]
    for name, file in files.items():
        _check(place, name, file)

    # Any: what load_states yields; packets become handles of this executor.
    def states(kind: str) -> Iterator[tuple[str, Any]]:
        for name in sorted(name for name in files if name.startswith(kind)):
            for key, state in load_states(place / name):
                yield key, open_handles(state, lambda packet: executor.handle(executor.put(packet)))

    server = dict(states("server"))
    return RunState(
        round=round,
        server=tree.to_tensors(server.get("server", {})),
        states={int(client): executor.put(state) for client, state in states("states")},
        server_memories={int(client): executor.put(state) for client, state in states("memories")},
    )


# Any: an entry of the manifest.
def _check(place: Path, name: str, file: Any) -> None:
    """DamagedFile unless the file is there, whole and unchanged."""
    if not re.fullmatch(r"server|(states|memories)-\d+", name.removesuffix(".safetensors")):
        raise DamagedFile(f"its manifest names {name!r}")
    try:
        with open(place / name, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DamagedFile(f"{name} cannot be read: {error.strerror}") from None
    if not isinstance(file, Mapping) or found != file.get("sha256"):
        raise DamagedFile(f"{name} is not what was written")
