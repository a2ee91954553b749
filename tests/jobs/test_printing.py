"""A reader that leaves ends no command, and no terminal is too simple for one."""

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
from tests.loaded_process import LoadedProcess, loaded_process

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


@pytest.fixture(scope="module")
def process() -> Iterator[LoadedProcess]:
    with loaded_process() as process:
        yield process


@pytest.fixture(scope="module")
def folder(process: LoadedProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a French name and two finished runs in it, with Greek labels, made on a terminal of ASCII."""
    folder = tmp_path_factory.mktemp("runs") / FRENCH
    folder.mkdir()
    for seed in (1, 2):
        words = ["run", "demo", "--inline", "--output", f"run{seed}", f"seed={seed}", "rounds=2", f"label={GREEK}"]
        done = process.rayfl(*words, folder=folder, encoding="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{ascii(FRENCH)[1:-1]}/run{seed}" in done.stdout and read_run(folder / f"run{seed}").finished
    return folder


LOOKING = [
    *("methods", "data run1/experiment.toml", "show run1", "ls .", "report run1", "compare run1 run2"),
    *("table run1 run2 --rows label --columns rounds", f"show {GREEK}", f"run {FRENCH}.toml"),
]


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        *((words, "ascii") for words in LOOKING),
        ("show run1", "latin-1"),
        ("ls .", "koi8-r"),
        (f"ls {GREEK}", "latin-1"),
    ],
)
def test_every_command_speaks_to_a_terminal_without_utf_8(
    words: str, encoding: str, folder: Path, process: LoadedProcess
):
    # Decoding raises if a byte is none of the encoding.
    done = process.rayfl(*words.split(), folder=folder, encoding=encoding)
    last = words.split()[-1]
    refused = not last.isascii()
    assert done.returncode == 2 * refused and "Unicode" not in done.stderr, done.stderr
    if refused:
        assert ascii(last)[1:-1] in done.stderr
    # Lines of tables are not escaped, but drawn with what there is.
    assert "\\u2" not in done.stdout


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
