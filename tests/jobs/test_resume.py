"""`rayfl resume`: the same run as without the cut, and one sentence for what cannot be resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rayfl
from jobs.cli import main
from jobs.single import run
from rayfl.run_directory import disk
from rayfl.run_directory.disk import locked
from rayfl.run_directory.record import read_run
from tests.actors.toys import assert_same_run, experiment, logged
from tests.refusals import check_sentence, line_with, refused


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds in one process."""
    return inline(tmp_path_factory.mktemp("finished") / "run", 4)


class KilledError(BaseException):
    """Stands for a kill: no `except Exception` sees it."""


def inline(directory: Path, rounds: int) -> Path:
    chosen = experiment("fedpse", rounds=rounds, runtime={"executor": "inline"}, output={"report": False})
    return run(chosen, directory)


def resume(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["resume", str(directory), *arguments])


def test_more_rounds_give_the_longer_run(finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "rayfl")
    directory = shutil.copytree(finished, tmp_path / "run")
    result = resume(directory, "--rounds", "6")
    assert result.exit_code == 0, result.output
    (sentence,) = logged(caplog)
    check_sentence(sentence, ["checkpoint", "round 4"])
    assert read_run(directory).experiment["rounds"] == 6
    assert_same_run(directory, inline(tmp_path / "longer", 6))


@pytest.mark.slow
def test_a_killed_driver_loses_nothing(tmp_path: Path):
    file = tmp_path / "experiment.toml"
    longer = inline(tmp_path / "longer", 40)
    file.write_text((longer / "experiment.toml").read_text().replace("every = 10", "every = 2"))
    directory = tmp_path / "killed"
    command = [sys.executable, "-m", "jobs.cli", "run", str(file), "--output", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2]) as process:
        while not list(directory.glob("checkpoints/*/manifest.json")) and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not read_run(directory).finished
    assert resume(directory).exit_code == 0
    assert_same_run(directory, longer)


def of_another_platform(directory: Path) -> None:
    path = directory / "platform.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))


def of_nothing(directory: Path) -> None:
    (directory / "experiment.json").unlink()


def untouched(directory: Path) -> None:
    """Leave the run as it is."""


@pytest.mark.parametrize(
    ("change", "arguments", "names"),
    [
        (untouched, [], ["finished", "--rounds", "4"]),
        (untouched, ["--rounds", "3"], ["rounds=3", "4"]),
        (untouched, ["--rounds", "6", "method.lr=0.5"], ["method.lr=0.1", "0.5", "new run"]),
        (untouched, ["--rounds", "6", "seed=7"], ["seed=1", "7", "new run"]),
        (untouched, ["--rounds", "6", "rumtime.actors=3"], ["rumtime", "runtime"]),
        (of_another_platform, ["--rounds", "6"], ["torch=1.0", "runtime.mixed=true"]),
        (of_nothing, [], ["experiment.json"]),
    ],
)
def test_what_cannot_be_resumed_gets_one_sentence_and_stays(
    change: Callable[[Path], None], arguments: list[str], names: list[str], finished: Path, tmp_path: Path
):
    directory = shutil.copytree(finished, tmp_path / "run")
    change(directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    refused(resume(directory, *arguments), names=names)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (lambda text: text.replace("every = 10", "every = 3"), ["checkpoint.every=10", "3"]),
        (lambda text: text.replace("seed = 1\n", ""), ["seed=1"]),
        (lambda text: text + "[runtime", ["TOML"]),
    ],
)
def test_an_edited_toml_file_is_refused_and_may_be_removed(
    finished: Path, tmp_path: Path, edit: Callable[[str], str], names: list[str]
):
    directory = shutil.copytree(finished, tmp_path / "run")
    path = directory / "experiment.toml"
    whole = path.read_text()
    path.write_text(edit(whole))
    before = contents(directory)
    refused(resume(directory, "--rounds", "6"), names=[path, *names, "KEY=VALUE", "remove"])
    with refused(names=[path, "KEY=VALUE"]):
        rayfl.resume(directory, rounds=6)
    assert contents(directory) == before
    path.unlink()
    assert resume(directory, "--rounds", "6", "checkpoint.every=4").exit_code == 0
    now = whole.replace("rounds = 4", "rounds = 6").replace("every = 10", "every = 4")
    assert path.read_text() == now, "the TOML file is written again"


def test_a_toml_file_with_other_spaces_is_not_edited(finished: Path, tmp_path: Path):
    directory = shutil.copytree(finished, tmp_path / "run")
    path = directory / "experiment.toml"
    path.write_text("# rayfl wrote this\n" + path.read_text().replace(" = ", "="))
    assert resume(directory, "--rounds", "5").exit_code == 0


def test_a_kill_while_a_resumed_run_is_described_is_no_edit(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = shutil.copytree(finished, tmp_path / "run")
    replace = os.replace
    for written in range(3):
        with monkeypatch.context() as patched:
            left = iter(range(written))

            def killed(*paths: Path, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise KilledError
                replace(*paths)

            patched.setattr(disk.os, "replace", killed)
            with pytest.raises(KilledError):
                resume(directory, "--rounds", "6")
    assert resume(directory, "--rounds", "6").exit_code == 0
    assert read_run(directory).finished and (directory / "experiment.toml").exists()


@pytest.mark.parametrize("key", ["method.lr", "seed", "sweep.seed", "rumtime"])
def test_no_setting_is_ignored_as_the_page_of_a_finished_run_is_drawn(finished: Path, tmp_path: Path, key: str):
    directory = shutil.copytree(finished, tmp_path / "run")
    refused(resume(directory, f"{key}=[7]", "output.report=true"), names=[key])
    assert not (directory / "report.html").exists()


@pytest.mark.parametrize("settings", [{"sweep": {"seed": [1, 2]}}, {"sweep.seed": [1, 2]}])
def test_a_sweep_is_no_setting_of_a_run(finished: Path, tmp_path: Path, settings: dict[str, Any]):
    directory = shutil.copytree(finished, tmp_path / "run")
    with refused(names=["sweep.seed", "rayfl sweep"]):
        rayfl.resume(directory, rounds=6, **settings)
    assert read_run(directory).experiment["rounds"] == 4


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("given", "rounds"),
    [
        ({"method": {"name": "fedavg", "lr_schedule": "cosine"}}, 6),
        ({"method": "dispfl", "topology": "ring", "clients": {"count": 10}}, 6),
    ],
)
def test_rounds_that_follow_their_number_are_not_made_more(tmp_path: Path, given: dict[str, Any], rounds: int):
    settings = {"runtime": {"executor": "inline"}, "output": {"report": False}, **given}
    chosen = experiment(rounds=3, **settings)
    directory = run(chosen, tmp_path / "run")
    before = contents(directory)
    result = resume(directory, "--rounds", str(rounds))
    refused(result, names=[f"rounds={rounds}", repr(chosen.method.name), "3", "new run"])
    assert contents(directory) == before


def test_a_cosine_of_a_length_of_its_own_may_get_more_rounds(tmp_path: Path):
    method = {"name": "fedavg", "lr_schedule": "cosine", "lr_rounds": 6}
    runs = [
        run(
            experiment(rounds=rounds, method=method, runtime={"executor": "inline"}, output={"report": False}),
            tmp_path / str(rounds),
        )
        for rounds in (3, 6)
    ]
    assert resume(runs[0], "--rounds", "6").exit_code == 0
    assert_same_run(*runs)


def test_a_checkpoint_of_other_settings_is_refused_and_named(finished: Path, tmp_path: Path):
    directory = shutil.copytree(finished, tmp_path / "run")
    chosen = experiment(
        "fedpse", rounds=4, seed=5, runtime={"executor": "inline"}, output={"report": False, "save_models": False}
    )
    other = run(chosen, tmp_path / "other")
    shutil.rmtree(directory / "checkpoints")
    shutil.copytree(other / "checkpoints", directory / "checkpoints")
    result = resume(directory, "--rounds", "6")
    refused(result, names=[f"{directory}/checkpoints/00000004", "settings", "seed", "files"])
    assert read_run(directory).rounds.equals(read_run(finished).rounds)


def test_links_and_somebody_elses_page_are_refused_before_anything_is_written(finished: Path, tmp_path: Path):
    directory = shutil.copytree(finished, tmp_path / "run")
    (directory / "report.html").write_text("mine")
    before = contents(directory)
    result = resume(directory, "--rounds", "6", "output.report=true")
    refused(result, names=[f"{directory}/report.html"])
    (directory / "models").rename(tmp_path / "models")
    (directory / "models").symlink_to(tmp_path / "models")
    result = resume(directory, "--rounds", "6")
    refused(result, names=[f"{directory}/models", "link"])
    assert contents(directory) == {path: content for path, content in before.items() if path.parent.name != "models"}


def test_a_run_that_goes_on_cannot_be_resumed_and_keeps_its_experiment(finished: Path, tmp_path: Path):
    directory = shutil.copytree(finished, tmp_path / "run")
    before = contents(directory)
    with locked(directory):
        result = resume(directory, "--rounds", "6")
    refused(result, names=[directory, "wait"])
    assert contents(directory) == before


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_changes_nothing(finished: Path, tmp_path: Path):
    directory = shutil.copytree(finished, tmp_path / "run")
    before = contents(directory)
    # A process of its own: this one may be connected to the tests' cluster.
    command = [sys.executable, "-m", "jobs.cli", "resume", str(directory), "--rounds", "6", "runtime.executor=ray"]
    command.append("runtime.address=127.0.0.1:1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    line_with(done.stderr, ["Ray", "127.0.0.1:1"])
    assert contents(directory) == before
