"""How a command ends: by signals of the user, and by its parent process if Ray ends it.

The first SIGINT or SIGTERM asks a run to stop after its round; the second one interrupts it at once.

A process whose Ray fails cannot report it. Ray's C++ code ends the process by `_exit`: 100 ms after an agent has died,
15 s after the raylet and 60 s after the gcs_server. So `supervised` forks before anything is imported. The child runs
the command and reports which processes of Ray it needs. The parent waits. If one of those processes dies, or the child
ends without a message, the parent ends the rest of the session and prints one sentence.
"""

import ctypes
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rayfl.untyped import Foreign, Json

_REPEAT_S = 0.2
"""Ignore a repeated signal within this time: the process group and the parent both deliver it."""
_REPEAT_AT_START_S = 1.0
"""The same before a run has begun, when the process may be busy with imports and there is no second stage."""


def interrupt_once() -> None:
    """Let SIGINT raise KeyboardInterrupt, but not twice if both the process group and the parent deliver it.

    The second one would come while the first is being reported. A SIGINT that the caller ignores stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interrupt(lambda: None, {}, asked=True, repeat_s=_REPEAT_AT_START_S))


@contextmanager
def stoppable(on_stop: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a first SIGINT or SIGTERM has come; that signal also calls `on_stop`.

    The next signal raises KeyboardInterrupt. A first signal inside two nested blocks calls both functions. Outside the
    main thread, which alone may handle signals, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    interrupt = Interrupt(on_stop, {number: signal.getsignal(number) for number in numbers})
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield lambda: interrupt.asked
    finally:
        for number, handler in interrupt.before.items():
            signal.signal(number, handler)


@dataclass
class Interrupt:
    """A signal handler; `before` has the handlers that it replaces."""

    on_stop: Callable[[], object]
    before: Mapping[int, Foreign]
    asked: bool = False
    repeat_s: float = _REPEAT_S
    last: tuple[int, float] = (0, -math.inf)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        (before, moment), self.last = self.last, (number, time.monotonic())
        if number == before and self.last[1] - moment < self.repeat_s:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.on_stop()
        outer = self.before[number]
        if isinstance(outer, Interrupt) and not outer.asked:
            outer(number, frame)


_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
"""Options of Linux's prctl: a process dies with its parent; a dead child's children become this process's children."""

TRACEBACK = "RAYFL_TRACEBACK"
"""The environment variable that shows tracebacks and the lines of C++ code, if it is not empty."""

_reports: int | None = None
"""In the child: the pipe to the parent."""
_reported: dict[str, Json] = {}
"""The facts that this process has reported."""


def tell_parent(**facts: Json) -> None:
    """Tell the parent what it needs for an error message. Do nothing if there is no parent.

    `run`: the run directory, which can be resumed once its experiment is written. `played`: the directory of a run
    whose rounds are over. `cluster`: the address of a cluster
    that was joined. `processes`: the names and ids of the processes that Ray cannot do without. `again`: what to do if
    there is no run to resume.
    """
    _reported.update(facts)
    if _reports is not None:
        os.write(_reports, json.dumps(facts).encode() + b"\n")


def way_back(reported: Mapping[str, Json] = _reported) -> str:
    """Say how to go on after an end at any moment, by the facts that were reported."""
    run = reported.get("run")
    if _is_played(reported):
        return reported.get("again") or f"all rounds of {run} are recorded; draw its page with: rayfl report {run}"
    begun = run is not None and Path(run, "experiment.json").is_file()
    return f"go on with: rayfl resume {run}" if begun else reported.get("again") or "run it again"


def _is_played(reported: Mapping[str, Json]) -> bool:
    return reported.get("run") is not None and reported["run"] == reported.get("played")


def supervised(command: Callable[[], object], failed: int) -> NoReturn:
    """Run a command in a child process; exit with its code, or with `failed` if it ends without one."""
    global _reports
    reports = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child:
        os.close(reports[1])
        os._exit(_Supervisor(child, reports[0]).wait(failed))
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(failed)
    interrupt_once()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.close(reports[0])
    _reports = reports[1]
    code = failed
    _hide_other_lines()
    try:
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else failed * (end.code is not None)
        raise
    finally:
        # Ctrl-C again, while this process cleans up, would show a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell_parent(over=code)
    sys.exit(code)


def _hide_other_lines() -> None:
    """Let only Python write to stderr, unless RAYFL_TRACEBACK is set.

    Ray's C++ code prints errors there too, also those from which it recovers.
    """
    if sys.stderr is None or os.environ.get(TRACEBACK):
        return
    settings: dict[str, Foreign] = {"buffering": 1, "encoding": sys.stderr.encoding, "errors": "backslashreplace"}
    # Stays open until the process ends.
    sys.stderr = sys.__stderr__ = open(os.dup(2), "w", **settings)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _Supervisor:
    """The parent of the process `child`, which writes its reports into the pipe `reports`."""

    def __init__(self, child: int, reports: int) -> None:
        self.child = child
        self.reports = os.fdopen(reports)
        self.known: dict[str, Json] = {}
        self.lost = ""

    def wait(self, failed: int) -> int:
        """Wait for the child's end, and report the error if the child did not; return the exit code."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        status = None
        while status is None:
            came = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
            # A terminal's signal is from the kernel (si_code > 0), which sends it to the child as well.
            if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
                os.kill(self.child, came.si_signo)
            status = self._ended()
        reader.join(timeout=5)
        if "over" in self.known:
            return self.known["over"]
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in _FORWARDED:
            # This process ends as the child did, so that its own parent sees the signal.
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        _end_children()
        if os.isatty(1):
            # The child's live display has left its line open and the cursor hidden.
            os.write(1, b"\x1b[?25h\n")
        with suppress(OSError):
            failed_run = "" if _is_played(self.known) else "the run failed: "
            sentence = f"rayfl: {failed_run}{self._reason(number)}; {way_back(self.known)}\n"
            os.write(2, sentence.encode(errors="backslashreplace"))
        return failed

    def _reason(self, number: int) -> str:
        if self.lost:
            return f"Ray's {self.lost} has ended"
        if number:
            memory = ", perhaps because memory ran out" if number == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(number).name}{memory} ({TRACEBACK}=1 may show more)"
        # A run that uses Ray reports its processes.
        words = "Ray has ended its process" if "processes" in self.known else "its process ended without a result"
        return f"Ray lost the cluster at {self.known['cluster']}" if self.known.get("cluster") else words

    def _ended(self) -> int | None:
        """The child's status if it has ended. Orphans of the child are waited for, too."""
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process in (0, self.child):
                    return status if process else None
        return None

    def _read(self) -> None:
        """Learn from the child's reports until it has ended."""
        for line in self.reports:
            facts = json.loads(line)
            self.known.update(facts)
            for name, process in facts.get("processes", {}).items():
                threading.Thread(target=self._watch, args=(name, process), daemon=True).start()

    def _watch(self, name: str, process: int) -> None:
        """Kill the child if a process that it needs ends. Nothing is watched if the kernel has no pidfd_open."""
        with suppress(OSError):
            select.select([os.pidfd_open(process)], [], [])
            if self.known["processes"].get(name) == process:
                self.lost = self.lost or name
                os.kill(self.child, signal.SIGKILL)


def _end_children() -> None:
    """End all descendants: the children of a child that has ended become children of this process."""
    import psutil

    while children := psutil.Process().children():
        for process in children:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(children)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
