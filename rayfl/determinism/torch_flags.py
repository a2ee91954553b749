"""Settings of torch with which a process computes the same bits every time (promise 1 of the design)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fix(threads: int, device: torch.device) -> None:
    """Set the thread count; on a GPU also deterministic algorithms, without cudnn's search for the fastest one."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


@contextmanager
def fixed(threads: int, device: torch.device) -> Iterator[None]:
    """`fix` for a while; the thread count is put back afterwards."""
    before = torch.get_num_threads()
    fix(threads, device)
    try:
        yield
    finally:
        torch.set_num_threads(before)
