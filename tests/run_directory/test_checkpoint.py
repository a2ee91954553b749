"""Checkpoints: whole or not there, the one before a damaged one, and runs that go on as if undisturbed."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.disk import checkpoints
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run
from rayfl.run_directory.states import load_states
from tests.actors.toys import assert_same_bits, assert_same_run, experiment, logged, played, write_experiment
from tests.refusals import check_sentence, refused


def begun(directory: Path) -> Path:
    """The directory of a run as jobs make it."""
    directory.mkdir()
    return write_experiment(directory)


# Any: a manifest.
def signed(path: Path, about: dict[str, Any]) -> None:
    """Write a manifest with its checksum: SHA-256 of its JSON with sorted keys."""
    checksum = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**about, "sha256": checksum}))


@pytest.fixture
def setup() -> Setup:
    return prepare(experiment("fedpse", rounds=8))


def saved(setup: Setup, directory: Path) -> InlineExecutor:
    """Checkpoints after 6 and 8 rounds."""
    executor = InlineExecutor(setup)
    play_run(setup, executor, RunOutput(directory, checkpoints=Checkpoints(every=2)))
    return executor


def test_the_newest_two_are_kept_and_hold_the_world(setup: Setup, tmp_path: Path):
    executor = saved(setup, tmp_path)
    assert list(checkpoints(tmp_path)) == [8, 6]
    _, run_state = played(setup, executor)
    read = checkpoint.load(tmp_path, executor)
    assert read is not None
    assert_same_bits(run_state, read)


def test_states_are_cut_into_files_of_bounded_size(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1)
    executor = saved(setup, tmp_path)
    states = list((tmp_path / "checkpoints" / "00000008").glob("states-*.safetensors"))
    read = checkpoint.load(tmp_path, executor)
    assert read is not None and len(states) == len(read.states) > 5


FEW = {"count": 10, "per_round": 1}
"""A client in ten changes in a round."""


def links(place: Path) -> set[str]:
    """The files that another checkpoint shares."""
    return {path.name for path in place.iterdir() if path.stat().st_nlink > 1}


def test_a_checkpoint_writes_what_has_changed_since_the_one_before(tmp_path: Path):
    setup = prepare(experiment("fedpse", rounds=30, clients=FEW))
    executor, written = InlineExecutor(setup), list[int]()

    def look(row: RoundRow, means: Mapping[str, float]) -> None:
        place = tmp_path / "checkpoints" / f"{row.round + 1:08d}"
        new = [path for path in place.glob("*-*.safetensors") if path.stat().st_nlink == 1]
        written.append(sum(len(dict(load_states(path))) for path in new))

    play_run(setup, executor, RunOutput(tmp_path, checkpoints=Checkpoints(every=1)), Listener(look))
    _, run_state = played(setup, executor)
    read = checkpoint.load(tmp_path, executor)
    assert read is not None and links(tmp_path / "checkpoints" / "00000030")
    assert_same_bits(run_state, read)
    # A state and a memory of one client, and what is left in a file of which less than a quarter was in use.
    assert min(written) == 2 and sum(written[10:]) < 20 * 2 * 2


def test_many_small_files_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "MOST_SMALL", 4)
    setup = prepare(experiment("scaffold", rounds=12, clients=FEW))
    most: list[int] = []

    def look(row: RoundRow, means: Mapping[str, float]) -> None:
        most.append(len([*(tmp_path / "checkpoints" / f"{row.round + 1:08d}").glob("states-*")]))

    executor = InlineExecutor(setup)
    play_run(setup, executor, RunOutput(tmp_path, checkpoints=Checkpoints(every=1)), Listener(look))
    read = checkpoint.load(tmp_path, executor)
    assert read is not None and max(most) <= 5 and 1 in most[5:]
    assert_same_bits(played(setup, executor)[1], read)


def test_a_file_that_two_checkpoints_share_is_missed_by_both(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    setup = prepare(experiment("fedpse", rounds=8, clients=FEW))
    executor = saved(setup, tmp_path)
    place = tmp_path / "checkpoints" / "00000008"
    for path in place.glob("states-*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert links(place) and checkpoint.load(tmp_path, executor) is None
    for sentence, name in zip(logged(caplog), ("00000008", "00000006"), strict=True):
        check_sentence(sentence, [f"checkpoint {name}", "damaged"])


def test_a_file_that_somebody_has_changed_is_not_shared_but_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1)
    setup = prepare(experiment("fedpse", rounds=23, clients=FEW))
    executor, damaged = InlineExecutor(setup), list[Path]()

    def damage(row: RoundRow, means: Mapping[str, float]) -> None:
        place = tmp_path / "checkpoints" / "00000020"
        if row.round == 19:
            damaged.extend(sorted(place.glob("states-*")))
            for path in damaged:
                path.write_bytes(path.read_bytes()[:-1] + b"?")

    play_run(setup, executor, RunOutput(tmp_path, checkpoints=Checkpoints(every=1)), Listener(damage))
    read = checkpoint.load(tmp_path, executor)
    assert len(damaged) > 5 and read is not None and read.round == 23 and not caplog.records
    assert links(tmp_path / "checkpoints" / "00000023")
    assert_same_bits(played(setup, executor)[1], read)


def test_a_file_system_without_links_gets_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    setup = prepare(experiment("fedpse", rounds=8, clients=FEW))
    executor = saved(setup, tmp_path)
    read = checkpoint.load(tmp_path, executor)
    assert read is not None and not links(tmp_path / "checkpoints" / "00000008")
    assert_same_bits(played(setup, executor)[1], read)


def truncate(place: Path) -> None:
    path = place / "states-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(place: Path) -> None:
    path = place / "server.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose(place: Path) -> None:
    (place / "memories-0000.safetensors").unlink()


def blank(place: Path) -> None:
    (place / "manifest.json").write_text("{", encoding="utf-8")


def point_elsewhere(place: Path) -> None:
    about = json.loads((place / "manifest.json").read_text())
    about["files"]["../../experiment.json"] = about["files"].pop("server.safetensors")
    (place / "manifest.json").write_text(json.dumps(about))


@pytest.mark.parametrize("damage", [truncate, flip, lose, blank, point_elsewhere])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    damage: Callable[[Path], None], setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    executor = saved(setup, tmp_path)
    damage(tmp_path / "checkpoints" / "00000008")
    run_state = checkpoint.load(tmp_path, executor)
    assert run_state is not None and run_state.round == 6
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint 00000008", "damaged"])


def test_what_was_cut_while_it_was_written_is_not_looked_at(setup: Setup, tmp_path: Path):
    executor = saved(setup, tmp_path)
    home = tmp_path / "checkpoints"
    (home / "00000008").rename(home / "00000008.partial")
    run_state = checkpoint.load(tmp_path, executor)
    assert run_state is not None and run_state.round == 6


def test_later_ones_that_were_passed_over_make_way_for_new_ones(setup: Setup, tmp_path: Path):
    executor = saved(setup, tmp_path)
    home = tmp_path / "checkpoints"
    (home / "00000009.partial").mkdir()
    # As after a run whose records ended before both that it had.
    for round, kept in ((2, ["00000002"]), (3, ["00000002", "00000003"]), (4, ["00000003", "00000004"])):
        checkpoint.save(tmp_path, RunState(round=round), executor)
        assert sorted(path.name for path in home.iterdir()) == kept


def test_nothing_is_left_where_the_disk_refuses(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(path: Path, states: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_states", full)
    checkpoint.save(tmp_path, RunState(round=3), InlineExecutor(setup))
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint", "round 3", os.strerror(errno.ENOSPC).lower()])
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_another_format_says_so(setup: Setup, tmp_path: Path):
    executor = saved(setup, tmp_path)
    path = tmp_path / "checkpoints" / "00000008" / "manifest.json"
    about = json.loads(path.read_text())
    del about["sha256"]
    signed(path, {**about, "format": 99, "rayfl": "7.0"})
    with refused(names=["00000008", "format 99", "rayfl 7.0", "format 5"]):
        checkpoint.load(tmp_path, executor)


@pytest.mark.parametrize(
    ("method", "every", "more"),
    [("fedpse", 1, {}), ("fedpse", 3, {}), ("local", 3, {}), ("fedpse", 1, {"clients": {**FEW, "per_round": 2}})],
)
def test_stopped_and_resumed_at_every_third_round_is_the_undisturbed_run(
    method: str, every: int, more: dict[str, Any], tmp_path: Path
):
    setup = prepare(experiment(method, rounds=8, **more))
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "undisturbed"))
    directory, resumed, stops = begun(tmp_path / "resumed"), False, 0
    while True:
        rounds: list[int] = []

        def stopping(rounds: list[int] = rounds) -> bool:
            rounds.append(0)
            return len(rounds) == 3

        try:
            play_run(
                setup,
                InlineExecutor(setup),
                RunOutput(directory, checkpoints=Checkpoints(every=every), resumed=resumed),
                Listener(stopping=stopping),
            )
            break
        except Stopped:
            resumed, stops = True, stops + 1
    assert stops == 2
    assert_same_run(tmp_path / "undisturbed", directory)


@pytest.mark.parametrize("every", [0, 3])
def test_a_run_that_was_cut_goes_back_to_its_checkpoint(every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "rayfl")
    setup = prepare(experiment("fedpse", rounds=8))
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "undisturbed"))

    def cut(row: RoundRow, means: Mapping[str, float]) -> None:
        if row.round == 4:
            raise KeyboardInterrupt

    directory = begun(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        play_run(
            setup, InlineExecutor(setup), RunOutput(directory, checkpoints=Checkpoints(every=every)), Listener(cut)
        )
    again: list[int] = []
    play_run(
        setup,
        InlineExecutor(setup),
        RunOutput(directory, checkpoints=Checkpoints(every=every), resumed=True),
        Listener(lambda row, means: again.append(row.round)),
    )
    assert again == list(range(every, 8))
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint", f"round {every}"])
    assert_same_run(tmp_path / "undisturbed", directory)


def test_a_checkpoint_beyond_the_records_is_not_used(tmp_path: Path):
    setup = prepare(experiment("fedavg", rounds=4))
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "long", checkpoints=Checkpoints(every=2)))
    shorter = replace(setup, rounds=2)
    play_run(shorter, InlineExecutor(setup), RunOutput(begun(tmp_path / "short"), checkpoints=Checkpoints(every=2)))
    shutil.copytree(tmp_path / "long" / "checkpoints" / "00000004", tmp_path / "short" / "checkpoints" / "00000004")
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "short", resumed=True))
    assert_same_run(tmp_path / "long", tmp_path / "short")
