"""Two processes for a command: one that speaks with Ray, and its parent, which has the last word where Ray takes it.

A process whose Ray fails cannot say so. Ray's C++ code ends it, by `_exit`, within 100 ms where an agent has died, 15 s
after the raylet and 60 s after the gcs_server have, and writes lines of its own. So `supervised` forks before anything
is imported. The child does all the work; the parent waits, looks whether the processes live that the child reports, and
where one does not, or the child ends without a word, it ends what is left of the session and says one sentence.
"""

import ctypes
import json
import os
import re
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""Linux: a process dies with its parent; orphans of the children become children."""

_OF_RAY = re.compile(
    rb"\((raylet|gcs_server|autoscaler|pid=\d+)[,)]|"
    rb"\[[\d-]+ [\d:,.]+ [A-Z] \d+ \d+\] |[IWEF]\d{4} [\d:.]+ +\d+ |\*\*\* |\s*(PC: )?@ |\S+\.so[.\d]*\(.*\) \[0x"
)
"""How lines of Ray's and gRPC's C++ code begin, and those of a stack that they print."""

ERROR_FILE = "RAYFL_ERROR_FILE"
"""The environment variable that names a file for the sentence of a command that fails."""

_reports: int | None = None
"""In the child: where it reports to the parent."""


def leave_sentence(sentence: str) -> None:
    """Write the sentence of a command that fails to the file that its caller named, if it did."""
    if path := os.environ.get(ERROR_FILE):
        Path(path).write_text(sentence, encoding="utf-8")


# Any: what JSON holds.
def report(**facts: Any) -> None:
    """Tell the parent what its sentence needs; without a parent nothing is done.

    `run`: the run directory, which can be resumed once its experiment is written. `cluster`: the address of a cluster
    that was joined. `processes`: names and numbers of the processes without which Ray ends.
    """
    if _reports is not None:
        os.write(_reports, json.dumps(facts).encode() + b"\n")


def supervised(command: Callable[[], object], failed: int) -> NoReturn:
    """Run a command in a child process; exits with its code, or with `failed` where it ended without one.

    Elsewhere than on Linux the command runs in this process, and has Ray's own last words.
    """
    if sys.platform != "linux":
        command()
        sys.exit(0)
    reports, errors, parent = os.pipe(), os.pipe(), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child:
        os.close(reports[1])
        os.close(errors[1])
        os._exit(_Supervisor(child, reports[0], errors[0]).wait(failed))
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(failed)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.close(reports[0])
    os.close(errors[0])
    _be_child(reports[1], errors[1])
    code = failed
    try:
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else failed * (end.code is not None)
        raise
    finally:
        report(over=code)
    sys.exit(code)


def _be_child(reports: int, errors: int) -> None:
    """Report to the parent, and let it read what C++ code writes to stderr; Python's goes where it went."""
    global _reports
    _reports = reports
    if sys.stderr is not None:
        encoding, user = sys.stderr.encoding, os.dup(2)
        # Open as long as the process.
        stream = open(user, "w", buffering=1, encoding=encoding, errors="backslashreplace")  # noqa: SIM115
        sys.stderr = sys.__stderr__ = stream
        os.dup2(errors, 2)
    os.close(errors)


class _Supervisor:
    """The parent of the process `child`, which reports to the pipe `reports` and whose stderr is the pipe `errors`."""

    def __init__(self, child: int, reports: int, errors: int) -> None:
        self.child = child
        self.reports, self.errors = reports, errors
        # Any: what JSON holds.
        self.known: dict[str, Any] = {}
        self.lost = ""
        self.rest = {reports: b"", errors: b""}
        self.watched = selectors.DefaultSelector()
        for pipe in (reports, errors):
            os.set_blocking(pipe, False)
            self.watched.register(pipe, selectors.EVENT_READ)

    def wait(self, failed: int) -> int:
        """Wait for the child's end, and say what it did not say; returns the exit code."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        status = None
        while status is None:
            came = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
            # A terminal's signal is the kernel's (si_code > 0) and comes to the child as well.
            if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
                os.kill(self.child, came.si_signo)
            status = self._ended()
        reader.join(timeout=5)
        if "over" in self.known:
            return self.known["over"]
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in _FORWARDED:
            # As its parent would see it.
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        _end_children()
        run = self.known.get("run")
        begun = run is not None and Path(run, "experiment.json").is_file()
        advice = f"go on with: rayfl resume {run}" if begun else "run it again"
        if os.isatty(1):
            # The child's live area has left its line open and the cursor hidden.
            os.write(1, b"\x1b[?25h\n")
        sentence = f"the run failed: {self._reason(number)}; {advice}"
        leave_sentence(sentence)
        os.write(2, f"rayfl: {sentence}\n".encode())
        return failed

    def _reason(self, number: int) -> str:
        if self.lost:
            return f"Ray's {self.lost} has ended"
        if number:
            memory = ", perhaps because memory ran out" if number == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(number).name}{memory}"
        cluster = self.known.get("cluster")
        return f"Ray lost the cluster at {cluster}" if cluster else "Ray has ended its process"

    def _ended(self) -> int | None:
        """The child's status if it has ended. Orphans of its children are taken care of, too."""
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process in (0, self.child):
                    return status if process else None
        return None

    def _read(self) -> None:
        """Take what comes from the child until it has ended."""
        while self.reports in self.watched.get_map():
            for key, _ in self.watched.select():
                if key.fd not in self.watched.get_map():
                    continue
                if key.data:
                    self._lose(key.data)
                self._take(key.fd)
        self._take(self.errors)

    def _take(self, pipe: int) -> None:
        """Learn from the reports that have come, or show the lines of stderr that are not Ray's."""
        if pipe == self.reports:
            for line in self._lines(pipe):
                self._learn(json.loads(line))
        elif pipe == self.errors and pipe in self.watched.get_map():
            for line in self._lines(pipe):
                if not _OF_RAY.match(line):
                    os.write(2, line)

    def _lines(self, pipe: int) -> Iterator[bytes]:
        """The lines that have come."""
        with suppress(BlockingIOError):
            while data := os.read(pipe, 65536):
                *lines, self.rest[pipe] = (self.rest[pipe] + data).split(b"\n")
                yield from (line + b"\n" for line in lines)
            self.watched.unregister(pipe)

    def _learn(self, facts: Mapping[str, Any]) -> None:
        self.known.update(facts)
        if "processes" in facts:
            for key in [key for key in self.watched.get_map().values() if key.data]:
                self.watched.unregister(key.fd)
                os.close(key.fd)
            for name, number in facts["processes"].items():
                if (handle := _handle(number)) is not None:
                    self.watched.register(handle, selectors.EVENT_READ, name)

    def _lose(self, name: str) -> None:
        """A process of Ray has ended, so the child must."""
        self.lost = self.lost or name
        self._learn({"processes": {}})
        with suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)


def _handle(process: int) -> int | None:
    """A file descriptor that can be read once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(process)
    except OSError:
        return None


def _end_children() -> None:
    """End all descendants: a child's children become ours when it has ended."""
    with suppress(ChildProcessError):
        while True:
            for process in children_of(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def children_of(parent: int) -> list[int]:
    """The processes whose parent is the process `parent`."""
    here, found = str(parent), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == here:
                found.append(int(entry.name))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
