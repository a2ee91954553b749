"""A disk that is full, failing or read-only: one sentence, nothing half-written taken for whole, and the same bits."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from click.testing import CliRunner, Result

from jobs.cli import main
from jobs.single import run
from rayfl.run_directory import checkpoint
from rayfl.run_directory.disk import DiskError, write_text
from rayfl.run_directory.record import Stream, read_run
from tests.actors.toys import assert_same_run, experiment, logged
from tests.refusals import check_sentence, mentions

ROOT = Path(__file__).resolve().parents[2]
FULL = os.strerror(errno.ENOSPC).lower()
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds with checkpoints after each second one."""
    settings = {"runtime": {"executor": "inline"}, "output": {"report": False}, "checkpoint": {"every": 2}}
    return run(experiment("fedpse", **settings), tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture
def same(undisturbed: Path, tmp_path: Path) -> Callable[[Path], None]:
    """Whether a run is the undisturbed one; looking at it takes a copy, since it changes what it looks at."""
    copy = shutil.copytree(undisturbed, tmp_path / "undisturbed")
    return lambda directory: assert_same_run(copy, directory)


def rayfl(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, number: int = errno.ENOSPC) -> None:
    """Let `owner.name` do so many calls and then say what the system says."""
    real, left = getattr(owner, name), [calls]

    def limited(*arguments: Any, **settings: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **settings)

    monkeypatch.setattr(owner, name, limited)


@pytest.mark.slow
def test_a_file_system_that_fills_up_anywhere_costs_no_bit(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(disk)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount a file system of their own")
    command = [*inside, sys.executable, "-m", "tests.run_directory.small_disk", str(disk)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(about["code"] in (0, 1) and about["partials"] == [] for about in runs)
    failed = [about for about in runs if about["code"]]
    for about in failed:
        check_sentence(about["said"].removesuffix("\n"), [f"{disk}/run", FULL])
        assert mentions(about["said"], "again") != mentions(about["said"], f"rayfl resume {disk}/run")
    # What went wrong in its first file left nothing; all others went on as if undisturbed.
    assert all(about["same"] or mentions(about["said"], "again") for about in runs)
    assert sum(bool(about["same"]) for about in failed) >= 5
    for about in failed:
        for notice in about["notices"]:
            check_sentence(notice, ["checkpoint", FULL])
    assert any(about["notices"] for about in failed)
    assert any(mentions(about["said"], "again") for about in failed)
    assert runs[-1]["code"] == 0


@pytest.mark.parametrize(
    ("owner", "name", "calls", "number", "cure"),
    [
        (Stream, "append", 7, errno.EIO, "disk"),
        (Stream, "sync", 4, errno.EROFS, "writable"),
        (safetensors.torch, "save_file", 0, errno.EIO, "disk"),
    ],
)
def test_what_is_refused_ends_the_run_with_a_sentence_and_is_made_good(
    owner: Any,
    name: str,
    calls: int,
    number: int,
    cure: str,
    undisturbed: Path,
    same: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, owner, name, calls, number)
        result = rayfl("run", undisturbed / "experiment.toml", "--output", directory)
    assert result.exit_code == 1, result.output
    facts = [directory, os.strerror(number).lower(), cure, f"rayfl resume {directory}"]
    check_sentence(result.stderr.removesuffix("\n"), facts)
    assert not read_run(directory).finished
    assert rayfl("resume", directory).exit_code == 0
    same(directory)


def test_without_room_for_a_checkpoint_the_run_goes_on_and_the_one_before_stays(
    undisturbed: Path,
    same: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Server, states and links of a checkpoint are a file each: the second checkpoint meets a full disk half-way.
    refuse(monkeypatch, checkpoint, "save_states", 4)
    result = rayfl("run", undisturbed / "experiment.toml", "--output", tmp_path / "run")
    assert result.exit_code == 0
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint", "round 4", tmp_path / "run", FULL, "round 2"])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000002"]
    same(tmp_path / "run")


def test_a_file_that_finds_no_room_leaves_the_one_before_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "before")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError) as raised:
        refuse(patch, Path, "write_text", 0)
        write_text(path, "after")
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(path) and path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_sentence_comes_from_the_coordinator_too(
    undisturbed: Path, same: Callable[[Path], None], tmp_path: Path
) -> None:
    # Who writes is another process, and a directory is no file that it could.
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "records").mkdir()
    (directory / "records" / "rounds.arrows.partial").mkdir()
    for name in ("experiment.json", "experiment.toml", "platform.json"):
        shutil.copy(undisturbed / name, directory / name)
    result = rayfl("resume", directory, "runtime.executor=ray", "runtime.actors=1")
    assert result.exit_code == 1, result.output
    check_sentence(result.stderr.removesuffix("\n"), [directory, f"rayfl resume {directory}"])
    (directory / "records" / "rounds.arrows.partial").rmdir()
    assert rayfl("resume", directory).exit_code == 0
    same(directory)


def test_an_error_of_the_disk_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(DiskError("full")))  # noqa: S301 (made here)
    assert isinstance(error, DiskError) and str(error) == "full"
