"""Checkpoints: the states from which a run resumes after any stop, on disk in whole or not at all.

    checkpoints/00000040/            before round 40, that is, after 40 rounds
        manifest.json                format, version, digest of the experiment, round, rows on record, numbers of
                                     states, size and SHA-256 of every other file, and its own SHA-256
        server.safetensors           the server's state
        states-0000.safetensors ...  client states, memories-0000.safetensors ... what the server keeps of clients

A checkpoint is written beside its place, synced, and renamed; the one before is kept, in case this one gets damaged.
Client states pass through memory a few at a time. Whatever is odd in a checkpoint makes it a damaged one.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rayfl import tree
from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_table
from rayfl.limits.regular_files import require_regular
from rayfl.rounds.executor import Executor, Ref
from rayfl.rounds.rounds import RunState
from rayfl.run_directory.atomic_files import sync_directory, write_json
from rayfl.run_directory.run_entries import MANIFEST
from rayfl.run_directory.state_files import DamagedFile, load_states, open_handles, save_states
from rayfl.settings import Settings, shown
from rayfl.tree import Arrays, State
from rayfl.version import __version__

log = logging.getLogger("rayfl")

FORMAT = 4
FILE_BYTES = 64 << 20
"""A file of states is closed when it is larger."""
KEPT = 2
_CHECKSUM = "sha256"


class Checkpoints(Settings):
    """The `[checkpoint]` table."""

    every: int = Field(default=10, ge=0, description="save after every so many rounds and at the end; 0: never")

    def due(self, num_done: int, last: bool) -> bool:
        """Whether to save after `num_done` rounds."""
        return self.every > 0 and (last or num_done % self.every == 0)


class _File(Settings):
    """A file of a checkpoint as its manifest has it."""

    bytes: int = Field(ge=0)
    sha256: str


class Manifest(Settings):
    """What a checkpoint is of, and what belongs to it."""

    format: int
    rayfl: str
    identity: str = Field(description="digest of what decides the run's numbers, see rayfl.experiment.identity")
    round: int = Field(ge=0)
    rows: Mapping[str, int]
    states: int = Field(ge=0, description="clients that have a state")
    memories: int = Field(ge=0, description="clients of whom the server keeps something")
    files: Mapping[str, _File]


def save(
    directory: Path,
    run_state: RunState,
    executor: Executor,
    num_rows: Mapping[str, int] | None = None,
    identity: str = "",
) -> Path:
    """Write a checkpoint of `run_state` into a run directory; returns its place.

    `num_rows`: the rows of each table of the records so far, without which the checkpoint would be of no use.
    `identity`: that of the setup. OSError where the disk refuses; then the checkpoints before are as they were.
    """
    home = directory / "checkpoints"
    home.mkdir(parents=True, exist_ok=True)
    place = home / f"{run_state.round:08d}"
    partial = home / f"{place.name}.partial"
    for left in (*home.glob("*.partial"), place):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    try:
        _fill(partial, run_state, executor, num_rows or {}, identity)
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
    directory: Path,
    executor: Executor,
    rows: Callable[[int], Mapping[str, int]] | None = None,
    identity: str | None = None,
    first: State | None = None,
) -> RunState | None:
    """The newest whole checkpoint of a run that its records reach; None where there is none.

    `rows` gives how many rows each table of the records has after a number of rounds; None: take the records for
    whole. `identity`: that of the setup (None: take any). `first`: the server's state before round 0, whose types a
    later one has too. A checkpoint that is passed over is logged. RayflError for one of another format or another
    experiment.
    """
    for place in _places(directory):
        try:
            about = _manifest(place)
            if identity is not None and about.identity != identity:
                raise RayflError(
                    f"checkpoint {place} is of a run with other settings, seed or files: put the one of this run back, "
                    "or remove it to go on from the one before"
                )
            if rows is None or _reached(about, rows):
                return _read(place, about, executor, first)
            log.warning("the records before checkpoint %s are not all there; the one before it is used", place.name)
        except DamagedFile as error:
            log.warning("checkpoint %s is damaged (%s); the one before it is used", place.name, error)
    return None


def _reached(about: Manifest, rows: Callable[[int], Mapping[str, int]]) -> bool:
    """Whether the records are those that were there when the checkpoint was written."""
    found = rows(about.round)
    return found["rounds"] == about.round and found == dict(about.rows)


def rounds_saved(directory: Path) -> list[int]:
    """The numbers of rounds after which there are checkpoints, newest first; they are not checked."""
    return [int(place.name) for place in _places(directory)]


def _places(directory: Path) -> list[Path]:
    home = directory / "checkpoints"
    found = [path for path in home.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name)] if home.is_dir() else []
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _fill(place: Path, run_state: RunState, executor: Executor, num_rows: Mapping[str, int], identity: str) -> None:
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
    manifest = Manifest(
        format=FORMAT,
        rayfl=__version__,
        identity=identity,
        round=run_state.round,
        rows=dict(num_rows),
        states=len(run_state.states),
        memories=len(run_state.server_memories),
        files=files,
    )
    about = manifest.model_dump(mode="json")
    write_json(place / MANIFEST, {**about, _CHECKSUM: _checksum(about)})


# Any: JSON.
def _checksum(about: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum, however it is spaced and ordered."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


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


def _manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as written. DamagedFile else, RayflError for another format."""
    try:
        about = dict(read_table(place / MANIFEST))
        checksum = about.pop(_CHECKSUM, None)
        # Older formats have no checksum.
        older = checksum is None and about.get("format") in range(1, FORMAT)
        if not older and checksum != _checksum(about):
            raise RayflError("it is not what was written")
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
        raise DamagedFile(f"its manifest is none: {error}") from None
    if manifest.round != int(place.name):
        raise DamagedFile(f"it is that of round {manifest.round}")
    _check_names(manifest.files)
    for name, file in manifest.files.items():
        _check(place, name, file)
    return manifest


def _check(place: Path, name: str, file: _File) -> None:
    """DamagedFile unless the file is there, whole and unchanged."""
    try:
        require_regular(place / name)
        with open(place / name, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            found = hashlib.file_digest(stream, "sha256").hexdigest() if size == file.bytes else None
    except OSError as error:
        raise DamagedFile(f"{name} cannot be read: {reason(error)}") from None
    if found != file.sha256:
        raise DamagedFile(f"{name} is not what was written")


def _check_names(names: Collection[str]) -> None:
    """DamagedFile unless the server is there, and files of states are numbered without a gap."""
    wanted = {"server.safetensors"}
    for kind in ("states", "memories"):
        numbered = sum(name.startswith(kind) for name in names)
        wanted |= {f"{kind}-{number:04d}.safetensors" for number in range(numbered)}
    if wanted != set(names):
        raise DamagedFile(f"its manifest names {shown(sorted(set(names) ^ wanted)[0])} wrongly or lacks it")


def _read(place: Path, about: Manifest, executor: Executor, first: State | None) -> RunState:
    """The run state in a checkpoint whose files are as they were written. DamagedFile where it is none."""
    states = dict(load_states(place / "server.safetensors"))
    if set(states) != {"server"}:
        raise DamagedFile("server.safetensors does not hold the server's state")
    server = tree.to_tensors(_with_handles(states["server"], executor))
    if first is not None:
        _check_types(server, first)
    return RunState(
        round=about.round,
        server=server,
        states=_read_states(place, about, "states", about.states, executor),
        server_memories=_read_states(place, about, "memories", about.memories, executor),
    )


def _read_states(place: Path, about: Manifest, kind: str, count: int, executor: Executor) -> dict[int, Ref]:
    """References to the states of one kind by client. DamagedFile where there are not `count`."""
    refs: dict[int, Ref] = {}
    for name in sorted(name for name in about.files if name.startswith(kind)):
        for key, state in load_states(place / name):
            if not re.fullmatch(r"0|[1-9][0-9]{0,17}", key) or int(key) in refs:
                raise DamagedFile(f"{name} holds the state of client {shown(key)}")
            refs[int(key)] = executor.put(_with_handles(state, executor))
    if len(refs) != count:
        raise DamagedFile(f"it holds {len(refs)} {kind} of {count}")
    return refs


def _with_handles(state: Arrays, executor: Executor) -> Arrays:
    """The state with its packets as handles of this executor."""
    return open_handles(state, lambda packet: executor.handle(executor.put(packet)))


def _check_types(state: State, first: State) -> None:
    """DamagedFile where a tensor of the server's state is of another type than it was before round 0."""
    now, then = tree.flatten(state), tree.flatten(first)
    for name in now.keys() & then.keys():
        found, wanted = (getattr(one[name], "dtype", None) for one in (now, then))
        if found != wanted:
            raise DamagedFile(f"{name} of the server is {found} and not {wanted}")
