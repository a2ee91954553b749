"""The memory of this machine, and the sentence for a setting or a file that asks for more of it."""

import os
from functools import cache
from pathlib import Path

from rayfl.errors import RayflError

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux keeps a container's limit, in versions 2 and 1."""


@cache
def machine_bytes() -> int:
    """Bytes of memory that this machine has, or its container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return min(limits)


def require(num_bytes: int, what: str, advice: str) -> None:
    """RayflError, which begins with `what` and ends with `advice`, if this machine has no `num_bytes` of memory."""
    if num_bytes > machine_bytes():
        raise RayflError(
            f"{what} takes {in_words(num_bytes)} of memory, and this machine has {in_words(machine_bytes())}; {advice}"
        )


def in_words(num_bytes: int) -> str:
    """Bytes as a user reads them: 512 bytes, 25.3 GB; powers of 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    if num_bytes >= 10**21:
        return f"{num_bytes:.1e} bytes"
    size, units = float(num_bytes), iter(("kB", "MB", "GB", "TB", "PB", "EB"))
    unit = ""
    while size >= 1000:
        size, unit = size / 1000, next(units)
    return f"{size:.1f} {unit}"
