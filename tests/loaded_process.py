"""Commands in processes of their own that have all modules of rayfl loaded already: each is forked from one process.

A command from a shell forks too (actors/supervision.py), but loads torch anew, which takes longer than most commands.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import gc, json, os, sys
from rayfl.determinism.process import prepare_process
prepare_process()
import pandas
from jobs import catalogue, reporting, resuming, single
from jobs.cli import main
from rayfl.choices.kinds import named
from rayfl.experiment.experiment import LISTED
for kind in LISTED.values():
    named(kind)
# As in actors/fork_server.py: a fork that ends does not look at all that was loaded.
gc.collect()
gc.freeze()

for line in sys.stdin:
    words, folder, encoding, output, errors = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ["PYTHONIOENCODING"] = encoding
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        stream.reconfigure(encoding=encoding)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:] = ["rayfl", *words]
    main()
"""


class LoadedProcess:
    """A process that runs commands, each in a fork of itself."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process, self.output, self.errors = process, folder / "output", folder / "errors"

    def rayfl(self, *words: object, folder: Path, encoding: str = "utf-8") -> "subprocess.CompletedProcess[str]":
        """Run `rayfl WORDS` in `folder`, with a terminal of this encoding. UnicodeDecodeError if it printed others."""
        assert self.process.stdin is not None and self.process.stdout is not None
        given = [str(word) for word in words]
        line = [given, str(folder), encoding, str(self.output), str(self.errors)]
        print(json.dumps(line), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        printed = [path.read_text(encoding=encoding) for path in (self.output, self.errors)]
        return subprocess.CompletedProcess(given, code, *printed)


@contextmanager
def loaded_process() -> Iterator[LoadedProcess]:
    """A process for the commands of a file of tests; it costs as much as two commands from a shell."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=folder,
            env=around,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        yield LoadedProcess(process, Path(folder))
