"""`rayfl sweep`, and `rayfl run` of a file with a sweep: what runs, is skipped, fails, and is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from jobs import single as running
from jobs import sweep as sweeping
from jobs.console import Audience
from jobs.display import Overall
from rayfl.errors import ClientError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.sweep import Combination, read_sweep
from rayfl.run_directory.record import read_records, read_run
from tests.actors.toys import assert_same_run, experiment
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, refused

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """
name = "small"
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedavg", lr = 0.1}
output = {report = false, save_models = false}

[sweep]
uplink = ["dense", {name = "topk", keep_ratio = 0.1, label = "top 10 %"}]
seed = [1, 2]
"""
NAMES = ["dense,seed=1", "dense,seed=2", "top-10,seed=1", "top-10,seed=2"]


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SWEEP)
    return path


def runs_in(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


@pytest.mark.parametrize(("command", "place"), [("run", "--output"), ("sweep", "--dir")])
def test_every_combination_has_its_run_and_all_are_on_one_page(file, command, place):
    result = rayfl(command, file, "--inline", place, "all")
    assert result.exit_code == 0, result.output
    assert runs_in("all") == NAMES
    for name in NAMES:
        run = read_run(Path("all", name))
        # 650 parameters and an example count of 64 bits, from each of four clients.
        assert run.finished and len(run.rounds) == 2
        assert (run.rounds["uplink_bits"][0].as_py() == 4 * (32 * 650 + 64)) == name.startswith("dense")
        assert run.experiment["seed"] == int(name[-1])
    page = Path("all/comparison.html").read_text()
    assert "4 federated runs" in page and ">top 10 %<" in page.replace("</span>", ">")
    assert "4/4" in result.output
    line_with(result.output, ["directory", Path("all").absolute()])
    # The closing table has the mean and the deviation of each method, not a row per run.
    rows = [[cell.strip() for cell in line.split("\u2502")] for line in result.output.splitlines() if "\u2502" in line]
    scores = {
        row[1]: [cell for cell in row if "\u00b1" in cell and cell.endswith("% (2)")] for row in rows if "1, 2" in row
    }
    assert set(scores) == {"dense", "top 10 %"} and all(scores.values())


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_takes_the_next_free_directory_of_its_name(file):
    for name in ("small", "small-2"):
        assert rayfl("sweep", file, "--inline", "--rounds", 1, "seed=1", "uplink=dense").exit_code == 0
        assert Path("runs", name, "comparison.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_has_finished_is_skipped_and_what_has_not_is_run(file):
    # Only the seed 1, then a run that was cut.
    assert rayfl("sweep", file, "--inline", "--dir", "all", "sweep.seed=[1]").exit_code == 0
    before = {name: Path("all", name, "records/rounds.parquet").stat().st_mtime_ns for name in NAMES[::2]}
    one = (read_sweep(file, ["runtime.executor=inline"]) or [])[1]
    cut(one.experiment, Path("all", NAMES[1]), 1)
    result = rayfl("sweep", file, "--inline", "--dir", "all")
    assert result.exit_code == 0, result.output
    assert result.output.count("skipped") == 2 and "[2/2]" in result.output
    assert before == {name: Path("all", name, "records/rounds.parquet").stat().st_mtime_ns for name in NAMES[::2]}
    assert all(read_run(Path("all", name)).finished for name in NAMES)


@pytest.mark.usefixtures("undrawn")
def test_another_experiment_in_the_directory_is_not_mistaken_for_the_same(file):
    assert rayfl("sweep", file, "--inline", "--dir", "all", "seed=1").exit_code == 0
    refused(rayfl("sweep", file, "--inline", "--dir", "all", "seed=2"), names=["dense", "seed=1", "2", "--overwrite"])
    refused(rayfl("sweep", file, "--inline", "--dir", "all", "seed=1", "rounds=3"), names=["rounds=2", "3"])
    assert rayfl("sweep", file, "--inline", "--dir", "all", "seed=1", "rounds=3", "--overwrite").exit_code == 0
    assert len(read_run(Path("all/dense")).rounds) == 3
    refused(rayfl("sweep", file, "--inline", "--dir", "all/dense"), names=["all/dense"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep.seed=[1, -2]"], ["dense, seed=-2"]),
        # What shows only once data and model are there.
        (['sweep.model=["logistic", "convnet2"]'], ["model=convnet2", "16x16"]),
        (["sweep.clients.count=[4, 5000]"], ["count=5000"]),
        (["--parallel", "0"], ["--parallel 0", "at least 1"]),
        (["sweep.uplink=3"], ["sweep.uplink=3", "list"]),
        (["report.tables=[{rows='uplink', columns='method.lrr'}]"], ["'method.lrr'", "'method.lr'"]),
        (["report.tables=[{rows='uplink', baseline='top 1 %'}]"], ["row or column is 'top 1 %'", "'top 10 %'"]),
    ],
)
def test_all_combinations_are_validated_before_anything_starts(file, arguments, words):
    refused(rayfl("sweep", file, "--inline", *arguments), names=words)
    assert not Path("runs").exists()


def test_a_file_without_a_sweep_is_refused_by_sweep(file):
    file.write_text(SWEEP.partition("[sweep]")[0])
    refused(rayfl("sweep", file, "--inline"), names=["[sweep]", "rayfl run"])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("error", [ClientError("round 1, client 2: boom"), KeyError("weight")])
def test_one_that_fails_does_not_end_the_others(file, monkeypatch, error):
    play = sweeping.run

    def sometimes(experiment, *rest):
        if experiment.label == "dense" and experiment.seed == 2:
            raise error
        return play(experiment, *rest)

    monkeypatch.setattr(sweeping, "run", sometimes)
    result = rayfl("sweep", file, "--inline", "--dir", "all")
    assert result.exit_code == 1
    said = str(error) if isinstance(error, ClientError) else "KeyError: 'weight'"
    (sentence,) = result.stderr.splitlines()
    check_sentence(sentence, ["dense, seed=2", said])
    assert runs_in("all") == [NAMES[0], *NAMES[2:]]
    assert "3 federated runs" in Path("all/comparison.html").read_text()
    # The same directory again: only that one is run.
    monkeypatch.setattr(sweeping, "run", play)
    result = rayfl("sweep", file, "--inline", "--dir", "all")
    assert result.exit_code == 0 and result.output.count("skipped") == 3 and runs_in("all") == NAMES


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_interrupted_ends_the_sweep(file, monkeypatch):
    play = sweeping.run

    def interrupted(experiment, output, *rest):
        play(experiment, output, *rest)
        if experiment.seed == 2:
            (output / "records/rounds.parquet").rename(output / "records/rounds.arrows")

    monkeypatch.setattr(sweeping, "run", interrupted)
    result = rayfl("sweep", file, "--inline", "--dir", "all")
    assert result.exit_code == 130 and runs_in("all") == NAMES[:2]
    line_with(result.output, ["1 of 4", f"--dir {Path('all').absolute()}"])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_round_of_a_run_ends_the_sweep_after_it(file, monkeypatch, number):
    finish = running.play_run

    def late(setup, executor, output, listener):
        def signalled(row, means):
            if row.round == setup.rounds - 1:
                os.kill(os.getpid(), number)
            listener.on_round(row, means)

        return finish(setup, executor, output, replace(listener, on_round=signalled))

    monkeypatch.setattr(running, "play_run", late)
    result = rayfl("sweep", file, "--inline", "--dir", "all")
    assert result.exit_code == 130 and runs_in("all") == NAMES[:1]
    assert read_run(Path("all", NAMES[0])).finished
    line_with(result.output, ["1 of 4", f"--dir {Path('all').absolute()}"])


def cut(experiment: Experiment, directory: Path, after: int) -> None:
    """Run until so many rounds are done, and end as a kill would."""
    play = running.play_run

    def killed(setup, executor, output, listener) -> None:
        def dying(row, means) -> None:
            if row.round + 1 == after:
                raise KeyboardInterrupt

        play(setup, executor, output, replace(listener, on_round=dying))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running, "play_run", killed)
        running.run(experiment, directory)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("parallel", [1, 2])
def test_what_was_cut_goes_on_from_its_checkpoint_with_the_same_bits(file, parallel):
    longer = SWEEP.replace("rounds = 2", "rounds = 6\ncheckpoint = {every = 2}")
    file.write_text(longer.replace("save_models = false", "save_models = true"))
    sweep = ["sweep", file, "--inline", "seed=1", "--dir"]
    assert rayfl(*sweep, "whole").exit_code == 0
    for one in read_sweep(file, ["seed=1", "runtime.executor=inline"]) or []:
        cut(one.experiment, Path("cut", one.directory), 5)
    shutil.rmtree("cut/top-10")
    done = rayfl(*sweep, "cut", "--parallel", parallel)
    assert done.exit_code == 0, done.output
    # Several at once run in processes of their own, whose rounds are not shown.
    played = sorted(line.partition("/")[0] for line in lines(done))
    assert played == ([] if parallel == 2 else ["1", "2", "3", "4", "5", "5", "6", "6"])
    for name in ("dense", "top-10"):
        assert_same_run(Path("whole", name), Path("cut", name))


def lines(done: Result) -> list[str]:
    return [line.partition(" rounds  ")[0] for line in done.stdout.splitlines() if re.search(r"\d/6 rounds  ", line)]


COMMON = ["rounds=6", "checkpoint.every=2", "seed=1", "uplink=dense", "sweep.clients.per_round=[2]"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        (["--overwrite"], lambda directory: None),
        (["--overwrite", "method.lr=0.2"], lambda directory: None),
        ([], lambda directory: shutil.rmtree(directory / "checkpoints")),
    ],
)
def test_what_cannot_go_on_begins_again(file, arguments, change):
    assert rayfl("sweep", file, "--inline", "--dir", "whole", *COMMON, *arguments).exit_code == 0
    (one,) = read_sweep(file, [*COMMON, "runtime.executor=inline"]) or []
    cut(one.experiment, Path("cut", one.directory), 5)
    change(Path("cut", one.directory))
    result = rayfl("sweep", file, "--inline", "--dir", "cut", *COMMON, *arguments)
    assert result.exit_code == 0 and len(lines_of(result)) == 6, result.output
    before, after = (read_run(Path(name, one.directory)) for name in ("whole", "cut"))
    assert before.metrics == after.metrics and before.clients == after.clients


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def of_another_platform(directory: Path) -> None:
    path = directory / "platform.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("parallel", [1, 2])
def test_an_unfinished_run_of_another_experiment_or_platform_stays(file, parallel):
    (one,) = read_sweep(file, [*COMMON, "runtime.executor=inline"]) or []
    directory = Path("cut", one.directory)
    cut(one.experiment, directory, 5)
    before = contents(directory)
    sweep = ["sweep", file, "--inline", "--dir", "cut", "--parallel", parallel, *COMMON]
    names = [directory, "unfinished", "method.lr=0.1", "0.2", "rounds=6", "7", "--dir", "--overwrite"]
    refused(rayfl(*sweep, "method.lr=0.2", "--rounds", 7), names=names)
    shutil.rmtree(directory / "checkpoints")
    refused(rayfl(*sweep, "method.lr=0.2"), names=["method.lr=0.1", "0.2"])
    assert contents(directory) == {path: content for path, content in before.items() if "checkpoints" not in path.parts}
    of_another_platform(directory)
    before = contents(directory)
    refused(
        rayfl(*sweep),
        names=["torch=1.0", "runtime.mixed=true"],
    )
    (directory / "platform.json").write_text("{")
    refused(rayfl(*sweep), names=["platform.json", "--overwrite"])
    assert contents(directory).keys() == before.keys()


@pytest.mark.usefixtures("undrawn")
def test_a_page_in_the_sweeps_directory_that_is_no_report_stays(file):
    Path("all").mkdir()
    Path("all/comparison.html").write_text("mine")
    refused(rayfl("sweep", file, "--inline", "--dir", "all"), names=["all/comparison.html"])
    assert [path.name for path in Path("all").iterdir()] == ["comparison.html"]


def lines_of(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if re.match(r"\d+/\d+ rounds  ", line)]


def test_the_report_of_a_sweeps_directory_is_of_its_runs(file):
    assert rayfl("sweep", file, "--inline", "--dir", "all", "seed=1").exit_code == 0
    Path("all/comparison.html").unlink()
    assert f"report: {Path('all').absolute()}/comparison.html" in rayfl("report", "all").output
    numbers = json.loads(rayfl("report", "all", "--json").stdout)
    assert [Path(run["directory"]).name for run in numbers] == ["dense", "top-10"]


def test_data_shows_the_first_combination(file):
    result = rayfl("data", file, "sweep.clients.count=[3, 2]")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("code", "log", "end"),
    [
        ("0", "waiting for room", ("finished", "")),
        ("130", "", ("stopped", "")),
        ("1", "rayfl: the run failed: boom\nsomething else", ("failed", "the run failed: boom")),
        ("1", "Traceback\n  File\nKeyError: 3\n", ("failed", "KeyError: 3")),
        ("9", "", ("failed", "its process ended with code 9")),
    ],
)
def test_the_end_of_a_process_and_for_what_it_waits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    log: str,
    end: tuple[str, str],
) -> None:
    (tmp_path / "log").write_text(log)
    (program := tmp_path / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/log\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    audience, one = Audience(), Combination("seed=1", "one", experiment())
    waiting = sweeping.Outcome(one, tmp_path / "one", "waiting")
    (found,) = sweeping.run_at_once([waiting], 2, False, None, Overall(audience.display, 1), audience)
    assert (found.status, found.error) == end and found.directory == tmp_path / "one"
    waiting = "seed=1: waiting for room\n" if log.startswith("waiting") else ""
    assert capsys.readouterr().out == f"{waiting}seed=1: {end[0]}\n"


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_several_at_once_give_the_same_records_and_one_may_fail(file):
    assert rayfl("sweep", file, "--inline", "--dir", "one", "seed=1").exit_code == 0
    # The second cannot open its lock, which shows only as it starts.
    Path("two/top-10/lock").mkdir(parents=True)
    command = [sys.executable, "-m", "jobs.cli", "sweep", str(file), "--inline", "--dir", "two", "--parallel", "2"]
    done = subprocess.run([*command, "seed=1"], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    check_sentence(done.stderr.removesuffix("\n"), ["top 10 %", "two/top-10/lock"])
    assert "dense: finished" in done.stdout
    one, two = (read_run(Path(name, "dense")) for name in ("one", "two"))
    assert one.metrics == two.metrics and one.clients == two.clients
    assert Path("two/top-10/lock").is_dir()


@pytest.mark.slow
@pytest.mark.ray
def test_several_at_once_share_one_ray_and_a_signal_ends_all_after_their_round(file):
    command = [sys.executable, "-m", "jobs.cli", "sweep", str(file), "--dir", "all", "--parallel", "2", "seed=1"]
    with subprocess.Popen(
        [*command, "--rounds", "100000"], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        records = [Path("all", name, "records/rounds.arrows") for name in ("dense", "top-10")]
        until = time.monotonic() + 200
        while not all(path.exists() and read_records(path.parents[1], "rounds").num_rows for path in records):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    line_with(rest, ["0 of 2", f"--dir {Path('all').absolute()}"])
    for name in ("dense", "top-10"):
        run = read_run(Path("all", name))
        assert not run.finished and 1 <= len(run.rounds) < 100_000


def test_the_sweep_that_the_documentation_shows_is_valid(file):
    page = (ROOT / "docs" / "how-to" / "sweep.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"```toml\n(\[sweep\]\n.*?)```", page, flags=re.DOTALL)
    file.write_text(SWEEP.partition("[sweep]")[0] + shown)
    found = read_sweep(file)
    assert found is not None and len(found) == 18
    assert found[-1].title == "seed=3, lr=0.1, top-k 1 %, feedback"


def test_the_shipped_sweep_is_valid():
    found = read_sweep(ROOT / "jobs/experiments/compress-fmnist.toml")
    assert found is not None and len(found) >= 12
    assert found[0].experiment.uplink.name == "dense"
    assert len({str(one.experiment.uplink) for one in found}) == len(found)
