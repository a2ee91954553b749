"""Set a process up before torch loads: its memory allocator, and arithmetic that repeats itself bit for bit.

Every process that does numbers (driver, coordinator, client actors, tests) calls `prepare_process` first. No torch is
imported here: MKL reads its environment when it is used for the first time.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def prepare_process() -> None:
    """Set the allocator, MKL and cuBLAS up. Calling it twice changes nothing.

    MKL_CBWR and CUBLAS_WORKSPACE_CONFIG take the one value that promise 1 of the design rests on, whatever the user's
    shell says. The allocator keeps freed memory, which activations need again at the next step: without it the kernel
    takes the pages and clears new ones, a third of the time of a small CNN.
    """
    os.environ["MKL_CBWR"] = "AVX2,STRICT"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    libc = _libc()
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TOP_PAD, 64 << 20)


def trim() -> None:
    """Give the memory that the allocator keeps back to the kernel, where the C library can."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL:
    """The C library that this process runs on."""
    return ctypes.CDLL(None)
