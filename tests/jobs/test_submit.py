"""`ray job submit --working-dir . -- python -m jobs.run FILE` on a local head, as on a cluster."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from jobs.bench.memory import descendants
from jobs.single import run
from rayfl.experiment.experiment import read
from rayfl.run_directory.checkpoint import rounds_saved
from rayfl.run_directory.record import read_run
from rayfl.run_directory.tables import read_table
from tests.actors.toys import assert_same_run

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOKEN = secrets.token_hex(32)
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


def environment() -> dict[str, str]:
    """This process's environment, with this Python first and no other cluster in it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return clean | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # Or `ray start` takes this machine's own address for the one that it is given.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(url: str) -> bool:
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def started_head() -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    """The dashboard's address of a Ray head that runs inside, and the process above all of its processes."""
    gcs, dashboard, client, agent, metrics = free_ports(5)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        options = {
            "port": gcs,
            "node-ip-address": "127.0.0.1",
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "ray-client-server-port": client,
            "dashboard-agent-listen-port": agent,
            "metrics-export-port": metrics,
            "num-cpus": 2,
            "temp-dir": scratch,
        }
        command = [
            str(BIN / "ray"),
            "start",
            "--head",
            "--block",
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        log = Path(scratch) / "head.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment(), cwd=scratch, start_new_session=True
            )
        try:
            address, deadline = f"http://127.0.0.1:{dashboard}", time.monotonic() + 60
            while not answers(f"{address}/api/version"):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield address, process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The dashboard's address of a Ray head that this module started."""
    with started_head() as (address, _):
        yield address


def submit(
    head: str, *arguments: str, wait: bool = True, options: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    given = ["--working-dir", ".", *["--no-wait"] * (not wait), *options]
    return ray_job(head, "submit", *given, "--", "python", "-m", "jobs.run", *arguments)


def ray_job(head: str, verb: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(BIN / "ray"), "job", verb, "--address", head, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)


@pytest.mark.ray
def test_a_submitted_job_runs_to_its_report(head, tmp_path):
    file, directory = tmp_path / "submitted.toml", tmp_path / "run"
    file.write_text(EXPERIMENT)
    done = submit(head, str(file), "--output", str(directory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2 rounds" in done.stdout
    run = read_run(directory)
    assert run.finished and len(run.rounds) == 2
    # 650 parameters in float32 and a sample count of 64 bits from each of four clients.
    assert run.rounds["uplink_bits"].to_pylist() == [4 * (32 * 650 + 64)] * 2
    assert json.loads((directory / "experiment.json").read_text())["name"] == "submitted"
    assert (directory / "report.html").stat().st_size > 10_000


@pytest.mark.ray
def test_a_submitted_mistake_fails_the_job_with_its_sentence(head, tmp_path):
    file, directory = tmp_path / "mistake.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.replace("actors = 2", "actors = 2\nnum_gpus = 0.5"))
    done = submit(head, str(file), "--output", str(directory))
    assert done.returncode != 0
    assert "rayfl: " in done.stdout and "num_gpus" in done.stdout
    assert "Traceback" not in done.stdout
    assert not directory.exists()


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
    while not (directory / "records").exists() or not len(read_table(directory, "rounds")):
        assert time.monotonic() < deadline, ray_job(head, "logs", "stopped").stdout
        time.sleep(0.05)
    stopped = ray_job(head, "stop", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    # Its records end where its checkpoint is.
    assert rounds_saved(directory) == [len(read_run(directory).rounds)]
    assert not read_run(directory).finished


@pytest.mark.ray
def test_the_same_job_goes_on_after_its_head_was_killed(head, tmp_path):
    file, directory = tmp_path / "submitted.toml", tmp_path / "run"
    file.write_text(EXPERIMENT.replace("rounds = 2", "rounds = 60\ncheckpoint = { every = 2 }"))
    command = (str(file), "--output", str(directory), "--resume")
    with started_head() as (address, process):
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
