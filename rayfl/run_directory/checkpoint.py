"""Checkpoints: the states from which a run resumes after any stop.

checkpoints/00000040/            before round 40, that is, after 40 rounds
    manifest.json                format, version, digest of the experiment, round, rows on record, numbers of
                                 states, size and SHA-256 of every other file, and its own SHA-256
    server.safetensors           the server's state, and that of the selection if it has one
    states-0000.safetensors ...  client states
    memories-0000.safetensors    what the server keeps of clients
    messages-0000.safetensors    messages of peers on their own clocks, each once, that somebody may still mix;
                                 "models" after training, and states from which trainings have "begun"

Client states pass through memory a few at a time. A checkpoint writes the states that have changed since the one before
it, and shares that one's other files by hard links. Of a client's states in several files that in the file with the
highest number counts.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Packet
from rayfl.errors import RayflError, log, reason
from rayfl.limits.json_files import read_json
from rayfl.limits.regular_files import require_regular
from rayfl.rounds.executor import Executor, Ref
from rayfl.rounds.rounds import RunState
from rayfl.rounds.run_state import Air, Clocks
from rayfl.run_directory.disk import (
    MANIFEST,
    STATES,
    DamagedFile,
    Stamp,
    checkpoints,
    new_checkpoint,
    portions,
    stamp,
    write_json,
)
from rayfl.run_directory.states import load_states, save_states
from rayfl.settings import Settings, shown
from rayfl.untyped import Anything, Json
from rayfl.version import __version__

SERVER = "server.safetensors"
FORMAT = 5
_CHECKSUM = "sha256"
_BESIDE_SERVER = ("selection", "downlink", "told")
"""Fields of `RunState` that lie in the server's file if they are not empty."""
VERSION = "version "
"""Beginning of the names of the server's earlier states."""

FILE_BYTES = 64 << 20
"""A file of states is closed when it is larger."""

LEAST_USED = 0.25
"""A file of the checkpoint before is shared if at least this share of its states has not changed; else it is written
anew, so that what is on the disk is at most four times what is needed."""

MOST_SMALL = 100
"""If the checkpoint before has more files of states below half of FILE_BYTES, these are written anew, in fewer ones."""


Held = tuple[Sequence[int], int]
"""The states in a file: the clients whose present states it holds, and the number of all its states."""


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
    files: Mapping[Annotated[str, Field(pattern=rf"^{STATES}$")], File]


class Saved(NamedTuple):
    """A checkpoint that this process has written: its folder, the number of rounds before it, and its files.

    `stamps`: those of its files of states.
    """

    folder: Path
    round: int
    held: Mapping[str, Held]
    files: Mapping[str, File]
    stamps: Mapping[str, Stamp]


class Checkpoints(Settings):
    """The `[checkpoint]` table."""

    every: int = Field(default=10, ge=0, description="save every N rounds and at the end; 0: never")

    def due(self, num_done: int, last: bool) -> bool:
        """Whether to save after `num_done` rounds."""
        return self.every > 0 and (last or num_done % self.every == 0)


def save(
    directory: Path,
    run_state: RunState,
    executor: Executor,
    num_rows: Mapping[str, int] | None = None,
    identity: str = "",
    before: Saved | None = None,
) -> Saved | None:
    """Write a checkpoint of `run_state` into a run directory; return what the next one takes as `before`.

    `num_rows`: the rows that each table of the records has so far; `load` compares them. `identity`: that of the setup.
    `before`: an earlier checkpoint of the same play of the run: what has not changed since is not written again.
    If writing fails, log why; the earlier checkpoints stay as they were, and the run continues without this one.
    """
    earlier = [earlier_round for earlier_round in checkpoints(directory) if earlier_round < run_state.round]
    try:
        with new_checkpoint(directory, run_state.round) as folder:
            shared = _shared(folder, run_state, before) if before else {}
            held = shared | _write_states(folder, run_state, executor, shared)
            known = {name: before.files[name] for name in shared} if before else {}
            manifest = Manifest(
                format=FORMAT,
                rayfl=__version__,
                identity=identity,
                round=run_state.round,
                rows=num_rows or {},
                states=len(run_state.states),
                memories=len(run_state.server_memories),
                files=known | {name: _measured(folder / name, True) for name in {SERVER, *held} - known.keys()},
            )
            about = manifest.model_dump(mode="json")
            write_json(folder / MANIFEST, {**about, _CHECKSUM: _checksum(about)})
        folder = folder.with_suffix("")
        return Saved(folder, run_state.round, held, manifest.files, {name: stamp(folder / name) for name in held})
    except OSError as error:
        log.warning(
            "no checkpoint before round %d, because %s cannot be written to (%s); the run continues, and would resume "
            "from %s",
            run_state.round,
            directory,
            reason(error),
            f"the checkpoint before round {earlier[0]}" if earlier else "the start",
        )
        return before


def _shared(folder: Path, run_state: RunState, before: Saved) -> dict[str, Held]:
    """Link the files of the checkpoint before that the new one at `folder` shares; returns what each holds."""
    shared: dict[str, Held] = {}
    small = {name for name in before.held if before.files[name].bytes < FILE_BYTES / 2}
    for name, (clients, size) in before.held.items():
        is_kept = name.startswith(("states", "memories"))
        same = [client for client in clients if is_kept and run_state.changed.get(client, -1) < before.round]
        if is_kept and len(same) >= LEAST_USED * size and (name not in small or len(small) <= MOST_SMALL):
            # A file system without links, or a file that somebody has changed or removed: its states are written anew.
            with suppress(OSError):
                if stamp(before.folder / name) == before.stamps[name]:
                    os.link(before.folder / name, folder / name)
                    shared[name] = (same, size)
    return shared


def _write_states(folder: Path, run_state: RunState, executor: Executor, shared: Mapping[str, Held]) -> dict[str, Held]:
    """Write the server's file, and files of the states that no shared file holds; returns what each of these holds."""
    maybe_empty = {
        **{name: tree.to_arrays(getattr(run_state, name)) for name in _BESIDE_SERVER},
        "air": run_state.air.to_arrays() if run_state.air != Air() else {},
        "stop": run_state.stop,
        "clocks": run_state.clocks.to_arrays() if run_state.clocks.peers else {},
    }
    kept = {"server": tree.to_arrays(run_state.server)} | {name: state for name, state in maybe_empty.items() if state}
    versions = {f"{VERSION}{version}": executor.get(ref) for version, ref in run_state.air.versions.items()}
    save_states(folder / SERVER, kept | versions)
    written: dict[str, Held] = {}
    kinds = {"states": run_state.states, "memories": run_state.server_memories, **run_state.clocks.objects()}
    for kind, refs in kinds.items():
        files = {name: contents for name, contents in shared.items() if name.startswith(kind)}
        shared_clients = {client for clients, _ in files.values() for client in clients}
        first = 1 + max(map(_number, files), default=-1)
        new = ({str(client): executor.get(ref)} for client, ref in sorted(refs.items()) if client not in shared_clients)
        for number, states in enumerate(portions(new, tree.num_bytes, FILE_BYTES), first):
            name = f"{kind}-{number:04d}.safetensors"
            save_states(folder / name, states)
            written[name] = ([*map(int, states)], len(states))
    return written


def _number(name: str) -> int:
    """The number of a file of clients' states."""
    return int(re.sub("[^0-9]", "", name))


def _measured(path: Path, synced: bool = False) -> File:
    """Size and digest of a file, which is first made to survive a loss of power if it is to be `synced`."""
    with open(path, "rb") as file:
        if synced:
            os.fsync(file.fileno())
        return File(bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _checksum(about: Mapping[str, Json]) -> str:
    """SHA-256 of a manifest without its checksum; spaces and the order of keys do not change it."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def load(
    directory: Path,
    executor: Executor,
    rows: Callable[[int], Mapping[str, int]] | None = None,
    identity: str | None = None,
) -> RunState | None:
    """The newest undamaged checkpoint of a run whose rounds are on record; None if there is none.

    `rows` gives the rows that each table of the records has after a number of rounds; None: do not compare them.
    `identity`: that of the setup; None: take any. A checkpoint that is passed over is logged. Raise RayflError for
    another format or another experiment.
    """
    for folder in checkpoints(directory).values():
        try:
            about = _read_manifest(folder)
            if identity is not None and about.identity != identity:
                raise RayflError(
                    f"checkpoint {folder} is of a run with other settings, seed or files: restore this run's one, or "
                    "remove it to continue from the checkpoint before it"
                )
            recorded = None if rows is None else rows(about.round)
            if recorded is None or (recorded["rounds"] == about.round and recorded == dict(about.rows)):
                return _read(folder, about, executor)
            log.warning("some records before checkpoint %s are missing; the checkpoint before it is used", folder.name)
        except DamagedFile as error:
            log.warning("checkpoint %s is damaged (%s); the checkpoint before it is used", folder.name, error)
    return None


def _read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were written.

    Raise DamagedFile if they are not; another RayflError if the manifest has another format.
    """
    try:
        about = dict(read_json(folder / MANIFEST))
        if about.pop(_CHECKSUM, None) != _checksum(about):
            raise DamagedFile("it is not what was written")
    except (OSError, ValueError) as error:
        raise DamagedFile(f"its manifest cannot be read: {error}") from None
    if about.get("format") != FORMAT:
        raise RayflError(
            f"checkpoint {folder} has format {shown(about.get('format'))}, written by rayfl {about.get('rayfl')}; this "
            f"is rayfl {__version__}, which reads format {FORMAT}: resume it with the version that wrote it"
        )
    try:
        manifest = Manifest(**about)
    except ValueError as error:
        raise DamagedFile(f"its manifest is not valid: {error}") from None
    if manifest.round != int(folder.name):
        raise DamagedFile(f"its manifest is of round {manifest.round}")
    if SERVER not in manifest.files:
        raise DamagedFile(f"its manifest lacks {SERVER}")
    for name, file in manifest.files.items():
        try:
            require_regular(folder / name)
            is_same = (folder / name).stat().st_size == file.bytes and _measured(folder / name) == file
        except OSError as error:
            raise DamagedFile(f"{name} cannot be read: {reason(error)}") from None
        if not is_same:
            raise DamagedFile(f"{name} is not what was written")
    return manifest


def _read(folder: Path, about: Manifest, executor: Executor) -> RunState:
    """The run state in a checkpoint whose files are as they were written. Raise DamagedFile if it holds none."""

    def with_handles(leaf: Anything) -> Anything:
        """A state with a handle in place of every packet."""
        if isinstance(leaf, Mapping):
            return {name: with_handles(inner) for name, inner in leaf.items()}
        return executor.handle(executor.put(leaf)) if isinstance(leaf, Packet) else leaf

    def states(kind: str, count: int | None = None) -> dict[int, Ref]:
        """References to the states of one kind by client, or to messages by their numbers."""
        refs: dict[int, Ref] = {}

        def new(name: str) -> Iterator[tree.State]:
            """The states in a file of clients that are not in `refs`."""
            for key, state in load_states(folder / name):
                if not re.fullmatch(r"0|[1-9][0-9]{0,17}", key):
                    raise DamagedFile(f"{name} holds the state of client {shown(key)}")
                if int(key) not in refs:
                    clients.append(int(key))
                    yield state if kind == "messages" else with_handles(state)

        # The newest state of each client first.
        for name in sorted((name for name in about.files if name.startswith(kind)), key=_number, reverse=True):
            clients: list[int] = []
            refs |= zip(clients, executor.put_all(new(name)), strict=True)
        if count is not None and len(refs) != count:
            raise DamagedFile(f"it holds {len(refs)} {kind} of {count}")
        return refs

    server_states = dict(load_states(folder / SERVER))
    names = {name for name in server_states if not name.startswith(VERSION)}
    if "server" not in names or names - {"server", "air", "clocks", "stop", *_BESIDE_SERVER}:
        raise DamagedFile(f"{SERVER} does not hold the server's state")
    versions = {
        int(name.removeprefix(VERSION)): executor.put(with_handles(server_states[name]))
        for name in server_states
        if name not in names
    }
    clocks = server_states.get("clocks")
    return RunState(
        round=about.round,
        server=tree.to_tensors(with_handles(server_states["server"])),
        selection=tree.to_tensors(server_states.get("selection", {})),
        downlink=tree.to_tensors(server_states.get("downlink", {})),
        told=tree.to_tensors(server_states.get("told", {})),
        stop=server_states.get("stop", {}),
        air=Air.from_arrays(server_states["air"], versions) if "air" in server_states else Air(),
        clocks=Clocks.from_arrays(clocks, {kind: states(kind) for kind in Clocks().objects()}) if clocks else Clocks(),
        states=states("states", about.states),
        server_memories=states("memories", about.memories),
    )
