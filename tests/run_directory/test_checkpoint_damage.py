"""Whatever becomes of a checkpoint's files, a run goes on with the bits that it had or does not use them."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayfl.errors import RayflError
from rayfl.experiment.identity import identity
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.play_run import RunOutput, play_run
from tests.actors.toys import assert_same_bits, experiment
from tests.refusals import refused

NEWEST = "00000003"


@dataclass(frozen=True)
class Saved:
    """A run of three rounds: its directory, and what its checkpoints after 2 and 3 rounds hold."""

    setup: Setup
    directory: Path
    truth: dict[int, RunState]

    def load(self, directory: Path) -> RunState | None:
        return checkpoint.load(directory, InlineExecutor(self.setup), None, self.setup.identity)


def played(directory: Path, seed: int) -> Setup:
    chosen = experiment("fedpse", seed=seed, rounds=3, clients={"count": 3}, model="logistic")
    setup = replace(prepare(chosen), identity=identity(chosen, chosen.as_dict()))
    play_run(setup, InlineExecutor(setup), RunOutput(directory, checkpoints=Checkpoints(every=1)))
    return setup


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    home = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        # A file for every client.
        patch.setattr(checkpoint, "FILE_BYTES", 1)
        setup = played(home / "run", 1)
        played(home / "other", 2)
    one = Saved(setup, home / "run", {})
    found = {}
    for round in (3, 2):
        copy = shutil.copytree(home / "run", home / "copy")
        for name in range(round + 1, 4):
            shutil.rmtree(copy / "checkpoints" / f"{name:08d}")
        state = one.load(copy)
        assert state is not None and state.round == round and state.states and state.server_memories
        found[round] = state
        shutil.rmtree(copy)
    yield Saved(setup, home / "run", found)


@pytest.fixture
def place(saved: Saved, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    return shutil.copytree(saved.directory, tmp_path / "run") / "checkpoints" / NEWEST


def went_on(saved: Saved, place: Path) -> int | None:
    """The round from which the run goes on, with the bits that it had then; None: it is refused in a sentence."""
    try:
        found = saved.load(place.parents[1])
    except RayflError as error:
        assert str(place.parent) in str(error) and "\n" not in str(error)
        return None
    assert found is not None, "the checkpoint before is whole"
    assert_same_bits(found, saved.truth[found.round])
    return found.round


def files(place: Path) -> list[Path]:
    return sorted(place.iterdir())


def test_a_flipped_byte_anywhere_changes_no_number(saved: Saved, place: Path):
    chance, passed_over = random.Random(0), 0
    for path in files(place):
        content = path.read_bytes()
        for at in (0, 8, len(content) - 1, *(chance.randrange(len(content)) for _ in range(12))):
            flipped = bytearray(content)
            flipped[at] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            passed_over += went_on(saved, place) == 2
        path.write_bytes(content)
    assert went_on(saved, place) == 3
    # A space more or less in a manifest says nothing.
    assert passed_over >= 15 * (len(files(place)) - 1)


def gone(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_the_round_before(path: Path) -> None:
    shutil.copy(path.parents[1] / "00000002" / path.name, path)


@pytest.mark.parametrize("damage", [gone, emptied, half, longer, pipe, folder, of_the_round_before])
def test_a_file_that_is_not_what_was_written_is_not_used(damage: Callable[[Path], None], saved: Saved, place: Path):
    for name in [path.name for path in files(place)]:
        copy = shutil.copytree(place.parents[1], place.parents[2] / name) / "checkpoints" / NEWEST
        damage(copy / name)
        assert went_on(saved, copy) == 2, name


def test_files_that_were_exchanged_are_not_used(saved: Saved, place: Path):
    names = [path.name for path in files(place)]
    other = saved.directory.parent / "other" / "checkpoints" / NEWEST
    for one, another in pairwise(names):
        pair = [(place / name).read_bytes() for name in (one, another)]
        (place / one).write_bytes(pair[1])
        (place / another).write_bytes(pair[0])
        assert went_on(saved, place) == 2, (one, another)
        for name, content in zip((one, another), pair, strict=True):
            (place / name).write_bytes(content)
    for name in names:
        content = (place / name).read_bytes()
        shutil.copy(other / name, place / name)
        assert went_on(saved, place) in (2, None), name
        (place / name).write_bytes(content)


def test_a_whole_checkpoint_of_another_run_is_refused(saved: Saved, place: Path):
    shutil.rmtree(place)
    shutil.copytree(saved.directory.parent / "other" / "checkpoints" / NEWEST, place)
    with refused(names=["00000003", "settings", "seed", "files"]):
        saved.load(place.parents[1])


# Any: a manifest.
def sign(place: Path, change: Callable[[dict[str, Any]], Any] = lambda about: None) -> None:
    """Write the manifest again, with all checksums, as somebody would who knows how."""
    about = json.loads((place / "manifest.json").read_text())
    del about["sha256"]
    for name in about["files"]:
        if (place / name).exists():
            content = (place / name).read_bytes()
            about["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(about)
    checksum = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (place / "manifest.json").write_text(json.dumps({**about, "sha256": checksum}))


def lacks(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda about: about["files"].pop(name)


def deep() -> Any:
    value: Any = {}
    for _ in range(500):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "change",
    [
        *map(lacks, ("server.safetensors", "states-0000.safetensors", "states-0002.safetensors")),
        lambda about: about["files"].clear(),
        lambda about: about["files"].update({"../../experiment.json": about["files"]["server.safetensors"]}),
        lambda about: about["files"].update({"states-0003.safetensors": None}),
        lambda about: about.update(files=[]),
        lambda about: about.update(rows=deep()),
        lambda about: about.update(rows={"rounds": "three"}),
        lambda about: about.update(round=2),
        lambda about: about.update(round=True),
        lambda about: about.update(states=10**30),
        lambda about: about.update(more=1),
        lambda about: about.pop("rows"),
    ],
)
def test_an_odd_manifest_is_a_damaged_one(change: Callable[[dict[str, Any]], Any], saved: Saved, place: Path):
    sign(place)
    assert went_on(saved, place) == 3
    sign(place, change)
    assert went_on(saved, place) == 2


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", "\xff"])
def test_a_manifest_that_is_none_is_a_damaged_one(text: str, saved: Saved, place: Path):
    (place / "manifest.json").write_text(text, encoding="latin-1")
    assert went_on(saved, place) == 2


# Any: a description of states, as states.py has it.
def describe(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> None:
    """Write a file of states again with another description, or other arrays."""
    size = int.from_bytes(path.read_bytes()[:8], "little")
    layout = json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["layout"])
    arrays = load_file(path)
    layout = change(layout, arrays) or layout
    save_file(arrays, path, {"layout": json.dumps(layout)})


@pytest.mark.parametrize(
    "change",
    [
        lambda layout, arrays: {"server": {"array": next(iter(arrays))}},
        lambda layout, arrays: {"nobody": layout["server"]},
        lambda layout, arrays: {"server": {"tree": [1]}},
        lambda layout, arrays: {"server": {"tree": {"a": {"array": "nothing"}}}},
        lambda layout, arrays: {"server": {"tree": {"a": {"bits": next(iter(arrays)), "shape": [10**9]}}}},
        lambda layout, arrays: {"server": {"tree": {"a": {"packet": {"codec": "os.system"}, "parts": {}}}}},
        lambda layout, arrays: {"server": {"tree": deep()}},
        lambda layout, arrays: {"server": None},
        lambda layout, arrays: [1],
    ],
)
def test_an_odd_state_is_a_damaged_one(change: Callable[..., Any], saved: Saved, place: Path):
    describe(place / "server.safetensors", change)
    sign(place)
    assert went_on(saved, place) == 2


@pytest.mark.parametrize("key", ["0", "-1", "x", "1.5", "9" * 5000])
def test_a_state_of_nobody_or_twice_is_a_damaged_one(key: str, saved: Saved, place: Path):
    describe(place / "states-0001.safetensors", lambda layout, arrays: {key: next(iter(layout.values()))})
    sign(place)
    assert went_on(saved, place) == 2
