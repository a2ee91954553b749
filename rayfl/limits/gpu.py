"""The memory of a GPU that several processes share."""

import math

from rayfl.errors import RayflError
from rayfl.limits.memory import in_words

CONTEXT_BYTES = 800_000_000
"""GPU memory of a process beside its tensors: CUDA's context, and the kernels of cuBLAS and cuDNN.

A generous guess for an H100 or H200, to be replaced by a measured number.
"""


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
