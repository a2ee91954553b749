"""The processes of a run under attack, and the ways to strike them.

Only processes below the given roots are found, so nothing of another Ray is touched.
"""

import os
import random
import resource
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.memory import descendants

ACTOR, COORDINATOR, DRIVER, GCS, RAYLET = "actor", "coordinator", "driver", "gcs", "raylet"


class Victim(NamedTuple):
    """A process; `began` distinguishes it from a later process with the same id."""

    pid: int
    began: str
    kind: str = ""

    @property
    def alive(self) -> bool:
        """Whether it runs or is stopped."""
        return began(self.pid) == self.began

    def strike(self, number: signal.Signals) -> bool:
        """Send a signal. Return False if the process is gone."""
        with suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)
                return True
        return False

    def limit_files(self, size: int) -> bool:
        """Let no file of this process grow beyond `size` bytes. Return False if the process is gone."""
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))
            return True
        return False


def processes(roots: Iterable[int]) -> list[Victim]:
    """All living processes among `roots` and below them."""
    pids = sorted({pid for root in roots for pid in descendants(root)})
    return [Victim(pid, moment, _kind(pid)) for pid in pids if (moment := began(pid))]


def began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _kind(pid: int) -> str:
    """The kind of a process; "" if it is never struck."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if words[0].startswith("ray::Coordinator"):
        return COORDINATOR
    # An idle worker of Ray becomes an actor or the coordinator in a moment.
    without_work = words[0].startswith("ray::IDLE") or any(word.endswith("/default_worker.py") for word in words[1:3])
    if without_work or words[0].startswith("ray::ClientActor"):
        return ACTOR
    if "jobs.cli" in words:
        return DRIVER
    return {"gcs_server": GCS, "raylet": RAYLET}.get(Path(words[0]).name, "")


def pick(victims: Iterable[Victim], kind: str, chance: random.Random, most: int = 1) -> list[Victim]:
    """At most `most` processes of a kind, drawn at random."""
    these = [victim for victim in victims if victim.kind == kind]
    return chance.sample(these, min(most, len(these)))
