"""`ray job submit --working-dir . -- python -m rayfl run FILE` on a local head, as on a cluster."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.memory import descendants
from jobs.single import run
from rayfl.experiment.experiment import read
from rayfl.run_directory.disk import checkpoints
from rayfl.run_directory.record import read_records, read_run
from tests.actors.heads import BIN, Head, answers, environment, started_head
from tests.actors.toys import assert_same_run

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
name = "submitted"
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
[clients]
count = 4
[method]
name = "fedavg"
lr = 0.1
[runtime]
actors = 2
"""


@pytest.fixture(scope="module")
def started() -> Iterator[Head]:
    """A Ray head that this module started."""
    with started_head() as found:
        yield found


@pytest.fixture(scope="module")
def head(started: Head) -> str:
    """The dashboard's address of the head."""
    return started.dashboard


def submit(
    head: str, *arguments: str, wait: bool = True, options: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    given = ["--working-dir", ".", *["--no-wait"] * (not wait), *options]
    return ray_job(head, "submit", *given, "--", "python", "-m", "rayfl", "run", *arguments)


def ray_job(head: str, verb: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(BIN / "ray"), "job", verb, "--address", head, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.ray
def test_the_probes_of_kuberay_need_no_token(started: Head):
    # The operator's probes of a pod ask these pages of the agent and of the dashboard, with no token, and look for the
    # word. Other pages need one.
    words = psutil.Process(started.process.pid).cmdline()
    (agent,) = [word.rpartition("=")[2] for word in words if "agent-listen-port" in word]
    # The agent begins after the dashboard.
    deadline = time.monotonic() + 60
    while not answers(f"http://127.0.0.1:{agent}/api/local_raylet_healthz"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for page in (f"http://127.0.0.1:{agent}/api/local_raylet_healthz", f"{started.dashboard}/api/gcs_healthz"):
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert b"success" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{started.dashboard}/api/jobs/", timeout=10)


@pytest.mark.slow
@pytest.mark.ray
def test_a_submitted_job_runs_to_its_report(head, tmp_path):
    file, directory = tmp_path / "submitted.toml", tmp_path / "run"
    file.write_text(EXPERIMENT)
    done = submit(head, str(file), "--output", str(directory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2 rounds" in done.stdout
    run = read_run(directory)
    assert run.finished and len(run.rounds) == 2
    # 650 parameters in float32 and an example count of 64 bits from each of four clients.
    assert run.rounds["uplink_bits"].to_pylist() == [4 * (32 * 650 + 64)] * 2
    assert json.loads((directory / "experiment.json").read_text())["name"] == "submitted"
    assert (directory / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.ray
def test_a_submitted_mistake_fails_the_job_with_its_sentence(head, tmp_path):
    file, directory = tmp_path / "mistake.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.replace("actors = 2", "actors = 2\nnum_gpus = 0.5"))
    done = submit(head, str(file), "--output", str(directory))
    assert done.returncode != 0
    assert "rayfl: " in done.stdout and "num_gpus" in done.stdout
    assert "Traceback" not in done.stdout
    assert not directory.exists()


@pytest.mark.slow
@pytest.mark.ray
def test_a_stopped_job_leaves_a_checkpoint(head, tmp_path):
    file, directory = tmp_path / "submitted.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.replace("rounds = 2", "rounds = 5000\ncheckpoint = { every = 5000 }"))
    # As docs/tutorials/cluster.md has it: this machine may need more than Ray's 3 seconds for a round.
    patient = ("--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}))
    options = ("--submission-id", "stopped", *patient)
    begun = submit(head, str(file), "--output", str(directory), wait=False, options=options)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    deadline = time.monotonic() + 120
    while not (directory / "records").exists() or not len(read_records(directory, "rounds")):
        assert time.monotonic() < deadline, ray_job(head, "logs", "stopped").stdout
        time.sleep(0.05)
    stopped = ray_job(head, "stop", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    # Its records end where its checkpoint is.
    assert list(checkpoints(directory)) == [len(read_run(directory).rounds)]
    assert not read_run(directory).finished


@pytest.mark.slow
@pytest.mark.ray
def test_the_same_job_goes_on_after_its_head_was_killed(head, tmp_path):
    file, directory = tmp_path / "submitted.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.replace("rounds = 2", "rounds = 60\ncheckpoint = { every = 2 }"))
    command = (str(file), "--output", str(directory), "--resume")
    with started_head() as (address, _, process):
        begun = submit(address, *command, wait=False)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        deadline = time.monotonic() + 120
        while not list(directory.glob("checkpoints/*/manifest.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        # The node dies as a whole: Ray's processes, and those of the job.
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert not read_run(directory).finished
    done = submit(head, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed = read(file, ["runtime.executor=inline", "output.report=false"])
    assert_same_run(directory, run(undisturbed, tmp_path / "undisturbed"))
