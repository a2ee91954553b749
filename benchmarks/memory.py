"""Peak memory of a process and all its descendants; shared pages count once (proportional set size)."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from actors.errors import ClusterError


def descendants(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    pids = [pid]
    for parent in pids:
        pids.extend(children.get(parent, ()))
    return pids


def proportional_bytes(pid: int) -> int:
    """Proportional set size of `pid` and all its descendants, in bytes."""
    total = 0
    for each in descendants(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class Resident(NamedTuple):
    """Bytes in memory: heaps by kind of process, and the shared memory in use.

    Heaps have neither shared memory nor mapped files. `rest`: the driver and Ray's own processes.
    """

    coordinator: int = 0
    actors: int = 0
    rest: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)


def resident() -> Resident:
    """Memory of this process and all its descendants, by kind of process."""
    heaps, shared = {"coordinator": 0, "actors": 0, "rest": 0}, 0
    for each in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes()
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_")}
        actor = b"ray::ClientActor", b"ray::Coordinator"
        kind = "actors" if command.startswith(actor[0]) else "coordinator" if command.startswith(actor[1]) else "rest"
        heaps[kind] += sizes.get("Pss_Anon:", 0)
        shared += sizes.get("Pss_Shmem:", 0)
    return Resident(**heaps, shared=shared)


class Peak:
    """Examples the memory of a running process until it ends; `bytes` is the largest sum seen.

    Reading a process's pages stops it for a moment, so `interval_s` should not be short.
    """

    def __init__(self, process: "subprocess.Popen[str]", interval_s: float = 1.0) -> None:
        self.process, self.interval_s, self.bytes = process, interval_s, 0
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        done = threading.Event()
        while self.process.poll() is None:
            self.bytes = max(self.bytes, proportional_bytes(self.process.pid))
            done.wait(self.interval_s)


def run_watched(
    module: str,
    *arguments: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[str, int]:
    """Run a module in its own process; return the last line that it prints and its peak memory.

    `environment` and `folder`: its variables and its current directory, by default this process's. Raise ClusterError
    if it fails.
    """
    command = [python, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        peak = Peak(process)
        output, _ = process.communicate()
        peak.thread.join()
    if process.returncode:
        raise ClusterError(f"{' '.join(command)} ended with exit code {process.returncode}; its output is above")
    return output.strip().splitlines()[-1], peak.bytes
