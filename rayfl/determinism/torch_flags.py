"""Settings of torch with which a process computes the same bits every time (promise 1 of the design)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayfl.determinism.process import InstructionSet, Precision, prepare_process
from rayfl.errors import RayflError

_chosen: list[InstructionSet] = []
"""The instruction set of this process, once chosen: torch keeps the first one that it computes with."""


def choose(instruction_set: InstructionSet) -> None:
    """Let this process compute with these instructions. Raise RayflError where torch computes with others already."""
    began_with = _chosen[0] if _chosen else None
    prepare_process(began_with or instruction_set)
    if began_with is None and instruction_set == "avx2" and "AVX512" in torch.backends.cpu.get_cpu_capability():
        began_with = "native"
    if began_with not in (None, instruction_set):
        prepare_process(began_with)
        raise RayflError(
            f"runtime.instruction_set={instruction_set!r} is too late: this process has computed with {began_with!r}; "
            "use another process"
        )
    _chosen[:] = [instruction_set]


def fix(threads: int, device: torch.device, precision: Precision = "fp32") -> None:
    """Set the thread count; on a GPU also deterministic algorithms, without cudnn's search for the fastest one.

    TF32 is on where `precision` says so and nowhere else: torch has it on for cuDNN's convolutions by itself.
    """
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def fixed(threads: int, device: torch.device, precision: Precision = "fp32") -> Iterator[None]:
    """`fix` for a while; the thread count is put back afterwards."""
    before = torch.get_num_threads()
    fix(threads, device, precision)
    try:
        yield
    finally:
        torch.set_num_threads(before)
