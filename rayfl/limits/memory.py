"""The memory of this machine and of a GPU that several processes share, and the errors for what needs more."""

import math
from functools import cache
from pathlib import Path

import psutil
from rich.filesize import decimal as in_words

from rayfl.errors import RayflError

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with a container's memory limit, in versions 2 and 1 of Linux's cgroups."""
CONTEXT_BYTES = 800_000_000
"""GPU memory of a process beside its tensors: CUDA's context, and the kernels of cuBLAS and cuDNN.

A generous guess for an H100 or H200, to be replaced by a measured number.
"""


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


def tensor_fraction(share: float, total_bytes: int) -> float:
    """The fraction of a GPU's `total_bytes` that the tensors of a process with a `share` of the GPU may take.

    As many processes as have that share fit on a GPU together with their contexts. Raise RayflError if the share leaves
    less for tensors than a context takes.
    """
    # A third of a GPU is written as 0.33, and three such actors share it.
    processes = max(1, math.floor(1 / share + 1e-9)) if share < 1 else 1
    left = total_bytes / processes - CONTEXT_BYTES
    if left < CONTEXT_BYTES:
        raise RayflError(
            f"runtime.num_gpus={share:g} puts {processes} actors on a GPU of {in_words(total_bytes)}, and each needs "
            f"{in_words(CONTEXT_BYTES)} besides its tensors; give every actor a larger share"
        )
    return left / total_bytes
