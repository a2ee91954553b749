"""A reader that leaves ends no command, and no terminal is too simple for one."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

from rayfl.run_directory.record import read_run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "jobs.cli"]
PRINTS = """
from rayfl.methods.server.fedavg import FedAvg

class Prints(FedAvg):
    name = "prints"
    def server_update(self, *args):
        print("a plug-in's own words")
        return super().server_update(*args)
"""
GREEK, FRENCH = "\N{GREEK CAPITAL LETTER OMEGA}", "\N{LATIN SMALL LETTER E WITH ACUTE}"


# Any: the arguments of subprocess.run.
def command(*words: object, folder: Path, encoding: str = "utf-8", **pipes: Any) -> "subprocess.CompletedProcess[str]":
    """Run rayfl in a process in `folder`, with a terminal of this encoding."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        encoding=encoding.partition(":")[0],
        timeout=120,
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes},
    )


@pytest.fixture
def nobody() -> Iterator[TextIO]:
    """The end of a pipe that has no reader."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as file:
        yield file


@pytest.mark.parametrize("words", [["methods"], ["methods", "fedavg"], ["data", "demo"]])
def test_a_list_without_a_reader_ends_in_silence(words: list[str], nobody: TextIO, tmp_path: Path):
    done = command(*words, folder=tmp_path, stdout=nobody)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_without_a_reader_plays_to_its_end(nobody: TextIO, tmp_path: Path):
    (tmp_path / "mine.py").write_text(PRINTS)
    words = ["run", "demo", "--output", "run", "--inline", "rounds=3", "output.report=false", "method=mine.py:Prints"]
    done = command(*words, folder=tmp_path, stdout=nobody)
    assert (done.returncode, done.stderr) == (0, "")
    found = read_run(tmp_path / "run")
    assert found.finished and len(found.rounds) == 3
    # The directory is taken now. The exit code says so, even if nobody reads the sentence.
    assert command(*words, folder=tmp_path, stdout=nobody, stderr=nobody).returncode == 2


def test_a_command_whose_output_is_closed_does_its_work(tmp_path: Path):
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, "ls", str(tmp_path)]
    assert subprocess.run(closed, cwd=ROOT, timeout=60, check=False).returncode == 0


LOOKING = [
    *("methods", "data run1/experiment.toml", "show run1", "ls .", "report run1", "compare run1 run2"),
    *("table run1 run2 --rows label --columns rounds", f"show {GREEK}", f"run {FRENCH}.toml"),
]
SPOKEN = [
    *((words, "ascii") for words in LOOKING),
    ("show run1", "latin-1"),
    ("ls .", "koi8-r"),
    (f"ls {GREEK}", "latin-1"),
]
RUNS = [f"run demo --inline --output run{seed} seed={seed} rounds=2 label={GREEK}" for seed in (1, 2)]
FORKS = """
import json, os, sys
from rayfl.determinism.process import prepare_process
prepare_process()
from jobs import catalogue, reporting, single
from jobs.cli import main

for number, (words, encoding) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ["PYTHONIOENCODING"] = encoding
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.reconfigure(encoding=encoding)
        os.dup2(os.open(f"../{number}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.argv[:] = ["rayfl", *words.split()]
    main()
"""
"""Runs commands one after the other, each in a process with a terminal of its encoding, and prints their exit codes.

The commands' modules are loaded once: that takes longer than most commands."""


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> "dict[tuple[str, str], subprocess.CompletedProcess[bytes]]":
    """What RUNS and SPOKEN printed, in a folder with a French name: two runs with Greek labels, and looks at them."""
    home = tmp_path_factory.mktemp("runs")
    folder = home / FRENCH
    folder.mkdir()
    commands = [*((words, "ascii") for words in RUNS), *SPOKEN]
    program = [sys.executable, "-c", FORKS, json.dumps(commands)]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    codes = subprocess.run(program, cwd=folder, env=around, stdout=subprocess.PIPE, timeout=240, check=True).stdout
    assert all(read_run(folder / f"run{seed}").finished for seed in (1, 2))
    printed = [((home / f"{n}.out").read_bytes(), (home / f"{n}.err").read_bytes()) for n in range(len(commands))]
    done = zip(commands, codes.split(), printed, strict=True)
    return {words: subprocess.CompletedProcess(words[0], int(code), *both) for words, code, both in done}


@pytest.mark.parametrize("words", RUNS)
def test_a_run_speaks_to_a_terminal_of_ascii(words: str, spoken: "dict[Any, subprocess.CompletedProcess[bytes]]"):
    done = spoken[words, "ascii"]
    assert (done.returncode, done.stderr) == (0, b"")
    run = words.split()[4]
    assert f"{ascii(FRENCH)[1:-1]}/{run}".encode() in done.stdout


@pytest.mark.parametrize(("words", "encoding"), SPOKEN)
def test_every_command_speaks_to_a_terminal_without_utf_8(
    words: str, encoding: str, spoken: "dict[Any, subprocess.CompletedProcess[bytes]]"
):
    done = spoken[words, encoding]
    # Decoding raises if a byte is none of the encoding.
    output, errors = done.stdout.decode(encoding), done.stderr.decode(encoding)
    last = words.split()[-1]
    refused = not last.isascii()
    assert done.returncode == 2 * refused and "Unicode" not in errors, errors
    if refused:
        assert ascii(last)[1:-1] in errors
    # Lines of tables are not escaped, but drawn with what there is.
    assert "\\u2" not in output


@pytest.mark.slow
def test_a_sweep_with_processes_of_its_own_speaks_to_a_terminal_of_ascii(tmp_path: Path):
    words = ["sweep", "demo", "sweep.seed=[1,2]", "--inline", "--parallel", "2", "rounds=1", f"label={GREEK}"]
    done = command(*words, "--dir", "sweep", folder=tmp_path, encoding="ascii")
    assert done.returncode == 0 and "Unicode" not in done.stderr


def test_a_live_bar_needs_no_utf_8(tmp_path: Path):
    master, slave = pty.openpty()
    words = ["run", "demo", "--inline", "--output", "run", "rounds=2", f"label={GREEK}"]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env=around, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        # The end of a terminal is an error.
        with suppress(OSError):
            while piece := os.read(master, 1 << 16):
                shown += piece
    os.close(master)
    assert (
        process.returncode == 0 and shown.isascii() and b"round 2/2" in shown and ascii(GREEK)[1:-1].encode() in shown
    )
