"""Checkpoints: the states from which a run resumes after any stop.

manifest.py describes their files. Client states pass through memory a few at a time.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Packet
from rayfl.errors import RayflError, reason
from rayfl.rounds.air import Air
from rayfl.rounds.executor import Executor, Ref
from rayfl.rounds.rounds import RunState
from rayfl.run_directory.disk import portions
from rayfl.run_directory.manifest import (
    SERVER,
    DamagedFile,
    Manifest,
    checkpoints,
    new_checkpoint,
    read_manifest,
    write_manifest,
)
from rayfl.run_directory.states import load_states, save_states
from rayfl.settings import Settings, shown
from rayfl.tree import Arrays, State

log = logging.getLogger("rayfl")

_BESIDE_SERVER = ("selection", "downlink")
"""Fields of `RunState` that lie in the server's file if they are not empty."""
VERSION = "version "
"""Beginning of the names of the server's earlier states."""

FILE_BYTES = 64 << 20
"""A file of states is closed when it is larger."""


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
) -> None:
    """Write a checkpoint of `run_state` into a run directory.

    `num_rows`: the rows that each table of the records has so far; `load` compares them. `identity`: that of the setup.
    If writing fails, log why; the earlier checkpoints stay as they were, and the run goes on without this one.
    """
    earlier = [found for found in checkpoints(directory) if found < run_state.round]
    try:
        with new_checkpoint(directory, run_state.round) as place:
            write_manifest(
                place,
                list(_write_states(place, run_state, executor)),
                identity=identity,
                round=run_state.round,
                rows=num_rows or {},
                states=len(run_state.states),
                memories=len(run_state.server_memories),
            )
    except OSError as error:
        log.warning(
            "no checkpoint before round %d, because %s cannot be written to (%s); the run goes on, and would resume "
            "from %s",
            run_state.round,
            directory,
            reason(error),
            f"the checkpoint before round {earlier[0]}" if earlier else "the start",
        )


def _write_states(place: Path, run_state: RunState, executor: Executor) -> Iterator[Path]:
    """Write the files of states of a checkpoint; yields each path."""
    others = {name: state for name in _BESIDE_SERVER if (state := getattr(run_state, name))}
    kept = {name: tree.to_arrays(state) for name, state in {"server": run_state.server, **others}.items()}
    kept |= {"air": run_state.air.to_arrays()} if run_state.air.next_number else {}
    kept |= {f"{VERSION}{number}": executor.get(ref) for number, ref in run_state.air.versions.items()}
    save_states(place / SERVER, kept)
    yield place / SERVER
    for kind, refs in (("states", run_state.states), ("memories", run_state.server_memories)):
        states_by_client = ({str(client): executor.get(ref)} for client, ref in sorted(refs.items()))
        for number, states in enumerate(portions(states_by_client, tree.num_bytes, FILE_BYTES)):
            path = place / f"{kind}-{number:04d}.safetensors"
            save_states(path, states)
            yield path


def load(
    directory: Path,
    executor: Executor,
    rows: Callable[[int], Mapping[str, int]] | None = None,
    identity: str | None = None,
    first: State | None = None,
) -> RunState | None:
    """The newest undamaged checkpoint of a run whose rounds are on record; None if there is none.

    `rows` gives the rows that each table of the records has after a number of rounds; None: do not compare them.
    `identity`: that of the setup; None: take any. `first`: the server's state before round 0; a later state has tensors
    of the same types. A checkpoint that is passed over is logged. Raise RayflError for another format or another
    experiment.
    """
    for place in checkpoints(directory).values():
        try:
            about = read_manifest(place)
            if identity is not None and about.identity != identity:
                raise RayflError(
                    f"checkpoint {place} is of a run with other settings, seed or files: restore this run's one, or "
                    "remove it to go on from the checkpoint before it"
                )
            found = None if rows is None else rows(about.round)
            if found is None or (found["rounds"] == about.round and found == dict(about.rows)):
                return _read(place, about, executor, first)
            log.warning("some records before checkpoint %s are missing; the checkpoint before it is used", place.name)
        except DamagedFile as error:
            log.warning("checkpoint %s is damaged (%s); the checkpoint before it is used", place.name, error)
    return None


def _read(place: Path, about: Manifest, executor: Executor, first: State | None) -> RunState:
    """The run state in a checkpoint whose files are as they were written. Raise DamagedFile if it holds none."""

    # Any: a state's leaf, and what stands for it.
    def with_handles(leaf: Any) -> Any:
        """A state with a handle in place of every packet."""
        if isinstance(leaf, Mapping):
            return {name: with_handles(inner) for name, inner in leaf.items()}
        return executor.handle(executor.put(leaf)) if isinstance(leaf, Packet) else leaf

    def states(kind: str, count: int) -> dict[int, Ref]:
        """References to the states of one kind by client."""
        refs: dict[int, Ref] = {}
        for name in sorted(name for name in about.files if name.startswith(kind)):
            for key, state in load_states(place / name):
                if not re.fullmatch(r"0|[1-9][0-9]{0,17}", key) or int(key) in refs:
                    raise DamagedFile(f"{name} holds the state of client {shown(key)}")
                refs[int(key)] = executor.put(with_handles(state))
        if len(refs) != count:
            raise DamagedFile(f"it holds {len(refs)} {kind} of {count}")
        return refs

    found = dict(load_states(place / SERVER))
    versions = {name: executor.put(with_handles(state)) for name, state in found.items() if name.startswith(VERSION)}
    if "server" not in found or set(found) - {"server", "air", *_BESIDE_SERVER, *versions}:
        raise DamagedFile(f"{SERVER} does not hold the server's state")
    server = tree.to_tensors(with_handles(found["server"]))
    if first is not None:
        _check_types(server, first)
    return RunState(
        round=about.round,
        server=server,
        **{name: tree.to_tensors(found.get(name, {})) for name in _BESIDE_SERVER},
        air=_air(found["air"], versions) if "air" in found else Air(),
        states=states("states", about.states),
        server_memories=states("memories", about.memories),
    )


def _air(arrays: Arrays, versions: Mapping[str, Ref]) -> Air:
    """Who is under way, and the server's states from which they began. Raise DamagedFile if they do not fit."""
    numbers = {name.removeprefix(VERSION): ref for name, ref in versions.items()}
    try:
        return Air.from_arrays(arrays, {int(number): ref for number, ref in numbers.items()})
    # A stranger's file can hold anything.
    except Exception as error:
        raise DamagedFile(f"{SERVER} does not hold who is under way ({error})") from error


def _check_types(state: State, first: State) -> None:
    """Raise DamagedFile if a tensor of the server's state has another type than before round 0."""
    now, then = tree.flatten(state), tree.flatten(first)
    for name in now.keys() & then.keys():
        found, wanted = (getattr(one[name], "dtype", None) for one in (now, then))
        if found != wanted:
            raise DamagedFile(f"{name} of the server is {found} and not {wanted}")
