"""The memory of this machine, and the error for a setting or a file that needs more."""

from functools import cache
from pathlib import Path

import psutil
from rich.filesize import decimal as in_words

from rayfl.errors import RayflError

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with a container's memory limit, in versions 2 and 1 of Linux's cgroups."""


@cache
def machine_bytes() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    limits = [psutil.virtual_memory().total]
    for path in _CGROUP:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return min(limits)


def require(num_bytes: int, what: str, advice: str) -> None:
    """Raise RayflError, which begins with `what` and ends with `advice`, if this machine has less memory."""
    if num_bytes > machine_bytes():
        raise RayflError(
            f"{what} takes {in_words(num_bytes)} of memory, and this machine has {in_words(machine_bytes())}; {advice}"
        )
