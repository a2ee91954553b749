"""Runs a command of rayfl in a forked child: a hang, a crash of the interpreter and a hunger for memory end there."""

import logging
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HANGS_S = 60
"""Seconds after which a command hangs. Loaded machines are slow, and a run starts a process of its own. Speed itself is
asserted in processor time."""
MORE_MEMORY_BYTES = 3 << 30
"""Address space that a command may take beyond that of the process that it was forked from."""


@dataclass(frozen=True)
class Outcome:
    """The end of a command: its exit code, or minus the signal that killed it; what it wrote; what it took."""

    code: int
    stdout: str
    stderr: str
    processor_s: float
    memory_bytes: int

    @property
    def hung(self) -> bool:
        return self.code == -signal.SIGALRM


def command(argv: Sequence[str], directory: Path, scratch: Path) -> Outcome:
    """`rayfl ARGV` in `directory`; what it prints goes through files in `scratch`."""

    def run() -> object:
        import ray

        from actors import session
        from jobs.cli import main
        from rayfl.report import page

        def no_ray(*arguments: object, **options: object) -> NoReturn:
            raise AssertionError("Ray would have been started")

        # An earlier test of this process may have joined a Ray: a fork of the process cannot talk to it, and waits.
        ray.is_initialized = lambda: False
        session._start = session._join = ray.shutdown = no_ray
        if argv[0] in ("report", "sweep"):
            # Pages go without the library that draws their charts: to make it takes seconds, and no case is about it.
            page.vega_javascript = str
        return main(args=list(argv), prog_name="rayfl")

    return forked(run, directory, scratch)


def forked(run: Callable[[], object], directory: Path, scratch: Path) -> Outcome:
    """Call `run` in a child process, in `directory`, with bounds on time and memory."""
    scratch.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    child = os.fork()
    if child == 0:
        _be_the_child(run, directory, scratch)
    _, status, usage = os.wait4(child, 0)
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        stdout=(scratch / "stdout").read_text(encoding="utf-8", errors="replace"),
        stderr=(scratch / "stderr").read_text(encoding="utf-8", errors="replace"),
        processor_s=usage.ru_utime + usage.ru_stime,
        memory_bytes=max(0, usage.ru_maxrss * 1024 - before),
    )


def _be_the_child(run: Callable[[], object], directory: Path, scratch: Path) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdin = open(os.devnull)  # noqa: SIM115 (the process ends below)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + MORE_MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # pytest's own, to which notices would go.
        logging.getLogger().handlers.clear()
        os.chdir(directory)
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (what an interpreter prints as it ends)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def process(argv: Sequence[str], directory: Path, root: Path) -> Outcome:
    """`rayfl ARGV` as a user starts it, from a checkout at `root`."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *argv],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * HANGS_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, 0.0, 0)
