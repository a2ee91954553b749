"""A command whose Ray fails ends in one sentence, and what it leaves can be resumed at once."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rayfl.run_directory.record import read_run
from tests.refusals import check_sentence, line_with, mentions

COMMAND = """
import os, subprocess, sys, time
from actors.supervision import supervised, tell_parent

def lose():
    other, raylet = subprocess.Popen(["sleep", "300"]), subprocess.Popen(["sleep", "300"])
    print(other.pid, flush=True)
    tell_parent(processes={"raylet": raylet.pid})
    raylet.kill()
    time.sleep(300)

def interrupt_twice():
    try:
        os.kill(os.getpid(), 2)
        time.sleep(60)
    except KeyboardInterrupt:
        os.kill(os.getpid(), 2)
        sys.exit(130)

def command():
    os.write(2, b"core_worker.cc:609: what C++ code prints\\n")
    tell_parent(run=sys.argv[1])
    {act}

supervised(command, 7)
"""
HIDDEN = "core_worker"
"""A part of the lines that Ray's C++ code prints, which users do not see."""


def supervised(act: str, run: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A supervised command that does `act`."""
    command = [sys.executable, "-c", COMMAND.replace("{act}", act), str(run)]
    around = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=Path(__file__).parents[2], env=around, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("act", "code", "facts"),
    [
        ("print('all of it')", 0, []),
        ("sys.exit(2)", 2, []),
        ("sys.exit(None)", 0, []),
        ("print('rayfl: its own error', file=sys.stderr); sys.exit(1)", 1, ["its own error"]),
        ("os._exit(1)", 7, ["its process"]),
        ("tell_parent(processes={}); os._exit(1)", 7, ["Ray"]),
        ("tell_parent(cluster='head:1'); os._exit(1)", 7, ["Ray", "head:1"]),
        ("os.abort()", 7, ["SIGABRT", "RAYFL_TRACEBACK=1"]),
        ("os.kill(os.getpid(), 9)", 7, ["SIGKILL", "memory"]),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM, []),
        ("lose()", 7, ["raylet"]),
        # To the process group, and from the parent.
        ("interrupt_twice()", 130, []),
    ],
)
def test_a_command_that_ends_without_an_error_gets_one(act: str, code: int, facts: list[str], tmp_path: Path) -> None:
    (tmp_path / "experiment.json").touch()
    done = supervised(act, tmp_path)
    assert done.returncode == code
    if facts:
        assert done.stderr.startswith("rayfl: ")
        more = [f"rayfl resume {tmp_path}"] if code == 7 else []
        check_sentence(done.stderr.removesuffix("\n"), [*facts, *more])
        # A run without Ray, or one before it has begun to use Ray.
        assert ("Ray" in done.stderr) is bool({"Ray", "raylet"} & {*facts})
    else:
        assert done.stderr == ""
    if act == "lose()":
        assert not psutil.pid_exists(int(done.stdout))


def test_the_lines_of_other_code_are_shown_with_tracebacks(tmp_path: Path) -> None:
    assert HIDDEN in supervised("print()", tmp_path, RAYFL_TRACEBACK="1").stderr


@pytest.mark.parametrize("again", ["", "again='go on with --dir D'"])
def test_a_run_that_was_killed_after_its_last_round_did_not_fail(again: str, tmp_path: Path) -> None:
    (tmp_path / "experiment.json").touch()
    done = supervised(f"tell_parent(played=sys.argv[1], {again}); os.kill(os.getpid(), 9)", tmp_path)
    assert done.returncode == 7
    facts = ["--dir D"] if again else [str(tmp_path), f"rayfl report {tmp_path}"]
    check_sentence(done.stderr.removesuffix("\n"), ["SIGKILL", *facts])
    assert "failed" not in done.stderr and "resume" not in done.stderr
    # The next run of a sweep is another one.
    done = supervised(f"tell_parent(played='other', {again}); os.kill(os.getpid(), 9)", tmp_path)
    check_sentence(done.stderr.removesuffix("\n"), ["failed", f"rayfl resume {tmp_path}"])


def test_a_run_that_did_not_begin_is_to_be_run_again(tmp_path: Path) -> None:
    sentence = supervised("os._exit(1)", tmp_path).stderr.removesuffix("\n")
    check_sentence(sentence, ["process", "run it again"])
    assert "rayfl resume" not in sentence


def test_a_terminal_gets_its_cursor_and_a_new_line_back() -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-c", COMMAND.replace("{act}", "os.write(1, b'a bar'); os._exit(1)"), "run"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=slave, stderr=subprocess.PIPE, timeout=60)
    os.close(slave)
    shown = b""
    # What was written comes in pieces, and after the last one an error.
    with suppress(OSError):
        while piece := os.read(master, 1000):
            shown += piece
    assert shown == b"a bar\x1b[?25h\r\n"
    check_sentence(done.stderr.decode().removesuffix("\n"), ["process"])
    os.close(master)


def test_a_signal_reaches_the_command_and_its_death_follows_its_parents() -> None:
    act = "import signal; signal.signal(2, lambda *_: print('asked', flush=True)); print(os.getpid(), flush=True); "
    command = [sys.executable, "-c", COMMAND.replace("{act}", act + "[signal.pause() for _ in range(9)]"), "run"]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        process.kill()
    child.wait(timeout=30)


EXPERIMENT = """
name = "failing"
rounds = 3000
data = "digits"
partition = "iid"
model = "logistic"
[clients]
count = 2
[method]
name = "fedavg"
lr = 0.1
[runtime]
actors = 1
[checkpoint]
every = 2
[output]
report = false
"""
HEAD = """
import os, sys
from actors import session
from rayfl.experiment.runtime import Runtime

with session.session(Runtime()):
    print(session.address(), os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""


AGENT = ("ray::DashboardAgent", "dashboard/agent.py")
"""Its name, and what it is called as long as it loads: on a busy machine rounds begin long before that is over."""


def descendant(root: int, program: str | tuple[str, ...]) -> int:
    """The process below `root` whose program or name, or one of several, ends so."""
    found = {}
    for each in psutil.Process(root).children(recursive=True):
        # Some end meanwhile; and what a process starts is called as it is for a moment.
        with suppress(psutil.Error):
            if any(word.endswith(program) for word in each.cmdline()[:3]):
                found[each.create_time()] = each.pid
    return found[min(found)]


def ended_by(kill: str | tuple[str, ...] | int, arguments: list[str], cwd: Path, **variables: str) -> str:
    """Run rayfl, SIGKILL a process when the tenth line is there, so that a checkpoint is, and return stderr.

    `kill`: the end of the name of a descendant's program, or of one of several names; or a process's number.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *arguments],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(10)]
    if not isinstance(kill, int):
        kill = descendant(process.pid, kill)
    os.kill(kill, signal.SIGKILL)
    # No hang: Ray itself gives up a gcs_server after 60 s.
    output, errors = process.communicate(timeout=150)
    assert "raylet" not in output
    assert process.returncode == 1 and "rounds" in lines[-1], lines
    return errors


@pytest.mark.slow
@pytest.mark.ray
def test_whatever_of_ray_dies_the_run_ends_in_a_sentence_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "failing.toml").write_text(EXPERIMENT)
    command, played = ["run", "failing.toml", "--output", "run"], []
    # The gcs_server ends soon after a raylet, and may be missed first.
    either = ("raylet", "gcs_server")
    for kill, names in ((AGENT, either), ("raylet", either), ("gcs_server", ("gcs_server",))):
        errors = ended_by(kill, command, tmp_path)
        *before, last = errors.splitlines()
        (name,) = (name for name in names if mentions(last, name))
        check_sentence(last, ["Ray", name, f"rayfl resume {tmp_path / 'run'}"])
        assert all("round" in line for line in before), errors
        assert HIDDEN not in errors and "Traceback" not in errors
        command = ["resume", "run"]
        played.append(len(read_run(tmp_path / "run").rounds))
    assert played == sorted(set(played)), played


@pytest.mark.slow
@pytest.mark.ray
def test_a_cluster_that_goes_away_and_a_ray_that_does_not_start_are_sentences(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "failing.toml").write_text(EXPERIMENT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD], cwd=root, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with head:
        assert head.stdout is not None
        address, token = head.stdout.readline().split()
        # Ray waits 60 s by default for a head to come back.
        joined = {"RAY_ADDRESS": address, "RAY_AUTH_TOKEN": token, "RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
        errors = ended_by(head.pid, ["run", "failing.toml", "--output", "run"], tmp_path, **joined)
    line_with(errors, ["Ray", address, f"rayfl resume {tmp_path / 'run'}"])
    assert HIDDEN not in errors and "Traceback" not in errors
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "resume", "run"],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(root), "RAY_TMPDIR": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    facts = ["Ray", "second", "NotADirectoryError", f"rayfl resume {tmp_path / 'run'}"]
    check_sentence(done.stderr.removesuffix("\n"), facts)
