"""Run directories that somebody or something damaged: one sentence and exit code 2, or the bits of a whole one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from jobs.single import run
from rayfl.experiment.sweep import read_sweep
from rayfl.run_directory.play_run import Stopped
from rayfl.run_directory.record import read_run
from tests.actors.toys import assert_same_run, logged
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with

pytestmark = pytest.mark.usefixtures("undrawn")

SWEEP = """
name = "small"
rounds = 6
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedpse", lr = 0.1}
checkpoint = {every = 2}
output = {report = false}
runtime = {executor = "inline"}

[sweep]
seed = [1]
"""
ONE = "seed=1"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps of one run: in `done` it is finished, in `cut` it was killed after its fifth round."""
    home = tmp_path_factory.mktemp("runs")
    (home / "small.toml").write_text(SWEEP)
    ((one),) = read_sweep(home / "small.toml") or []
    run(one.experiment, home / "done" / ONE)

    def killed(*arguments: object) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        # The fifth round is on record, and there is no checkpoint after it.
        patch.setattr("jobs.console.line", lambda row, *_: killed() if row.round == 4 else "")
        run(one.experiment, home / "cut" / ONE)
    return home


def answered(result: Result, *codes: int) -> None:
    """One of these codes, and a sentence where it is not 0."""
    assert isinstance(result.exception, SystemExit | None), result.exc_info
    assert result.exit_code in codes, result.output
    assert result.exit_code == 0 or len(result.stderr.strip().splitlines()) == 1, result.stderr


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def third(path: Path) -> None:
    """Little enough that an experiment's TOML file lacks tables that it cannot do without."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00garbage" * 20)


def no_table(path: Path) -> None:
    path.write_text("[1, 2]")


def nothing(path: Path) -> None:
    path.write_text("null")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


def into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DESCRIPTION = ("experiment.json", "platform.json")


@pytest.mark.parametrize("damage", [Path.unlink, empty, third, garbage, no_table, nothing, into_directory])
@pytest.mark.parametrize("name", DESCRIPTION)
@pytest.mark.parametrize("state", ["cut", "done"])
def test_a_description_that_is_damaged_is_named(runs: Path, state: str, name: str, damage: Damage, tmp_path: Path):
    home = shutil.copytree(runs / state, tmp_path / "sweep")
    damage(home / ONE / name)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    more = ["--rounds", "8"] if state == "done" else []
    answered(rayfl("resume", home / ONE, *more), 2)
    answered(rayfl("report", home, "--json"), 2)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    answered(rayfl("sweep", runs / "small.toml", "--dir", home), 0, 1, 2)


@pytest.mark.parametrize("damage", [Path.unlink, empty, half, garbage, flip, into_directory])
@pytest.mark.parametrize("table", ["rounds", "clients", "metrics"])
def test_a_finished_table_that_is_damaged_is_named(runs: Path, table: str, damage: Damage, tmp_path: Path):
    home = shutil.copytree(runs / "done", tmp_path / "sweep")
    path = home / ONE / "records" / f"{table}.parquet"
    damage(path)
    result = rayfl("report", home, "--json")
    if damage is Path.unlink:
        answered(result, 0)
        return
    if damage is flip and result.exit_code == 0:
        # Some bytes of a page's header say nothing that counts.
        assert read_run(home / ONE).rounds.equals(read_run(runs / "done" / ONE).rounds)
        return
    answered(result, 2)
    check_sentence(result.stderr.removesuffix("\n"), [path, "restore"])
    answered(rayfl("resume", home / ONE, "--rounds", 8), 2)
    answered(rayfl("sweep", runs / "small.toml", "--dir", home), 2)
    answered(rayfl("sweep", runs / "small.toml", "--dir", home, "--overwrite"), 0)


@pytest.mark.parametrize("damage", [Path.unlink, empty, half, garbage])
@pytest.mark.parametrize(
    "name",
    [
        "records/rounds.arrows",
        "records/clients.arrows",
        "records/metrics.arrows",
        "checkpoints/00000004/manifest.json",
        "checkpoints/00000004/server.safetensors",
        "checkpoints/00000004/states-0000.safetensors",
    ],
)
def test_a_cut_run_that_is_damaged_goes_on_with_the_same_bits(runs: Path, name: str, damage: Damage, tmp_path: Path):
    whole = shutil.copytree(runs / "done" / ONE, tmp_path / "whole")
    for number, command in enumerate(("resume", "sweep")):
        home = shutil.copytree(runs / "cut", tmp_path / str(number))
        damage(home / ONE / name)
        answered(rayfl("report", home, "--json"), 0, 2)
        arguments = [home / ONE] if command == "resume" else [runs / "small.toml", "--dir", home]
        result = rayfl(command, *arguments)
        answered(result, 0)
        assert_same_run(whole, home / ONE)


def test_records_that_lost_rows_are_not_gone_on_with(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    # The stream is whole and says less than it did: only the checkpoint knows.
    home = shutil.copytree(runs / "cut", tmp_path / "sweep")
    half(home / ONE / "records" / "metrics.arrows")
    assert rayfl("resume", home / ONE).exit_code == 0
    (notice,) = logged(caplog)
    check_sentence(notice, ["records", "checkpoint 00000004"])
    assert_same_run(shutil.copytree(runs / "done" / ONE, tmp_path / "whole"), home / ONE)


def test_a_manifest_of_another_round_is_no_manifest(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    home = shutil.copytree(runs / "cut", tmp_path / "sweep")
    path = home / ONE / "checkpoints" / "00000004" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "round": 2}))
    assert rayfl("resume", home / ONE).exit_code == 0
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint 00000004", "damaged", "manifest"])
    assert_same_run(shutil.copytree(runs / "done" / ONE, tmp_path / "whole"), home / ONE)


def test_a_directory_where_a_table_belongs_is_named(runs: Path, tmp_path: Path):
    directory = shutil.copytree(runs / "cut" / ONE, tmp_path / "run")
    into_directory(directory / "records" / "clients.arrows")
    for command in ("resume", "report"):
        result = rayfl(command, directory)
        answered(result, 2)
        check_sentence(result.stderr.removesuffix("\n"), [directory / "records" / "clients.arrows"])


def test_what_is_in_the_way_is_named(runs: Path, tmp_path: Path):
    directory = shutil.copytree(runs / "cut" / ONE, tmp_path / "run")
    place = directory / "lock"
    into_directory(place)
    result = rayfl("resume", directory)
    answered(result, 1)
    check_sentence(result.stderr.removesuffix("\n"), [place, f"rayfl resume {directory}"])


def test_what_is_in_a_trackers_way_costs_only_the_tracker(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    directory = shutil.copytree(runs / "cut" / ONE, tmp_path / "run")
    shutil.rmtree(directory / "tensorboard")
    (directory / "tensorboard").write_text("in the way")
    assert rayfl("resume", directory).exit_code == 0
    line_with(logged(caplog), ["tracker tensorboard", directory / "tensorboard"])
    assert (directory / "tensorboard").read_text() == "in the way"
