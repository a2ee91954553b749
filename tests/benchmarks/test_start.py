"""`python -m benchmarks start`: commands in a terminal, the moments of their stages, and whose processor time it is."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.start import COMMANDS, END, STAGES, Watched, kind, processor_times
from tests.benchmarks.commands import benchmark
from tests.jobs.commands import rayfl
from tests.refusals import refused

EPOCH = """
import sys, time
def show(words):
    sys.stdout.write(words)
    sys.stdout.flush()
    time.sleep(0.05)
assert sys.stdout.isatty() and sys.stdin.isatty()
show("\\x1b[?25l")
show("\\x1b[2Kload")
show("ing")
show("\\rround 1/3, client 2 of 4")
show("\\rround 1/3  accuracy 0.5")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let `rayfl` be a program that shows some words."""
    (tmp_path / "jobs").mkdir()
    for name, text in (("__init__.py", ""), ("cli.py", EPOCH)):
        (tmp_path / "jobs" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("program")
def test_stages_begin_when_the_terminal_shows_them():
    marks = {name: STAGES[name] for name in ("the first line", "the first round is over")}
    watched = Watched(["run"], {**marks, "loading": "loading", "never": "drawing the page"})
    watched.wait()
    assert watched.code == 0 and "loading" in watched.text and "\x1b" not in watched.text
    order = ["the first line", "loading", "the first round is over", END]
    assert sorted(watched.seconds, key=lambda name: watched.seconds[name]) == order
    # Each was shown in a write of its own, and the first line before its end.
    assert len(set(watched.seconds.values())) == len(order)


@pytest.mark.usefixtures("program")
def test_a_run_that_shows_no_stages_is_not_measured(tmp_path: Path):
    with refused(names=["round 1/3  accuracy 0.5"], error=start.ClusterError):
        start.run_demo(str(tmp_path))


def test_the_terminal_of_a_run_shows_the_stages_in_order(tmp_path: Path):
    words = [*start.demo(str(tmp_path)), "--inline", "clients.count=4", "data=digits"]
    watched = Watched(words, STAGES)
    watched.wait()
    assert watched.code == 0, watched.text
    # Without Ray there are neither a Ray nor actors to start.
    seen = [name for name in STAGES if name in watched.seconds]
    assert set(STAGES) - set(seen) <= {"starting Ray", "starting actors"}
    assert [watched.seconds[name] for name in seen] == sorted(watched.seconds[name] for name in seen)
    assert watched.seconds[END] >= max(watched.seconds.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_end_as_they_should(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = rayfl(*COMMANDS[name])
    if name.startswith("rayfl "):
        assert result.exit_code == 0
    else:
        assert result.exit_code == 2 and result.stderr.startswith("rayfl: ")


def test_processes_are_told_apart_by_their_command_lines():
    lines = {
        "ClientActor": ["ray::ClientActor.call", ""],
        "Coordinator": ["ray::Coordinator", ""],
        "IDLE": ["ray::IDLE", ""],
        "driver": [sys.executable, "-m", "jobs.cli", "run", "demo"],
        "gcs_server": ["/x/ray/core/src/ray/gcs/gcs_server", "--log_dir=/tmp"],
        "agent": [sys.executable, "-u", "/x/ray/_private/runtime_env/agent/main.py", "--node-ip-address=127.0.0.1"],
        "log_monitor.py": [sys.executable, "-u", "/x/ray/_private/log_monitor.py"],
    }
    assert {name: kind(words) for name, words in lines.items()} == {name: name for name in lines}


def test_processor_time_is_that_of_the_process_and_all_below_it():
    before = time.process_time()
    found = processor_times(os.getpid())
    # In ticks of the kernel's clock.
    assert abs(found[os.getpid()][1] - before) < 1.0 and all(seconds >= 0 for _, seconds in found.values())


def test_too_few_repeats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    refused(benchmark("start", "--repeats", 0), names=["--repeats 0"])
