"""The lock of a run directory, which another user of the machine cannot hold."""

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from rayfl import toml
from rayfl.run_directory.disk import locked
from tests.actors.toys import experiment
from tests.jobs.commands import rayfl


def mode(path: Path | int) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_its_owner_may_open_it_because_whoever_opens_it_can_hold_it(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        with locked(tmp_path):
            assert mode(tmp_path / "lock") == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("older", [0o644, 0o666, 0o604])
def test_that_of_an_older_run_is_closed_to_others(tmp_path: Path, older: int):
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(older)
    with locked(tmp_path):
        assert mode(tmp_path / "lock") == 0o600


def test_every_file_that_a_run_locks_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[tuple[str, int]] = []
    flock = fcntl.flock

    def noted(file: int | IO[bytes], kind: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        opened.append((os.readlink(f"/proc/self/fd/{descriptor}"), mode(descriptor)))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", noted)
    changes = {"runtime": {"executor": "inline"}, "output": {"report": False}, "checkpoint": {"every": 1}}
    file = tmp_path / "experiment.toml"
    file.write_text(toml.dumps(experiment("fedavg", rounds=1, **changes).as_dict()))
    for words in (["run", file, "--output", tmp_path / "run"], ["resume", tmp_path / "run", "--rounds", 2]):
        result = rayfl(*words)
        assert result.exit_code == 0, result.output
    assert str(tmp_path / "run" / "lock") in {path for path, _ in opened}
    assert not [path for path, found in opened if found & 0o077]
