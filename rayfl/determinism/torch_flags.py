"""Settings of torch with which a process computes the same bits every time."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from rayfl.determinism.process import ArithmeticPrecision
from rayfl.untyped import Foreign

_filling: Foreign = torch.utils.deterministic


def fix(threads: int, device: torch.device, precision: ArithmeticPrecision = "fp32") -> None:
    """Set the thread count; on a GPU also deterministic algorithms, without cudnn's search for the fastest one.

    With deterministic algorithms torch would also fill every empty tensor; this is switched off, since nothing reads
    such a tensor before it is written. TF32 is on only if `precision` is "tf32": by default torch has it on for cuDNN's
    convolutions.
    """
    torch.set_num_threads(threads)
    if device.type == "cuda":
        # What a model compiles later is deterministic, too.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        _use_deterministic_algorithms(True, warn_only=False)
        _filling.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _precisions() -> list[Foreign]:
    """The parts of torch that have a precision of their own for products of float32; older versions have none."""
    modules: list[Foreign] = [torch.backends]
    for outer in (torch.backends.mkldnn, torch.backends.cuda, torch.backends.cudnn):
        modules += [outer, *(getattr(outer, name) for name in ("matmul", "conv", "rnn") if hasattr(outer, name))]
    return [module for module in modules if hasattr(module, "fp32_precision")]


def _use_deterministic_algorithms(on: bool, warn_only: bool) -> None:
    """As torch's function, which loads torch's compiler and so takes seconds; here only if the compiler is loaded."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if on else "default")


@contextmanager
def own_flags() -> Iterator[None]:
    """Context manager and decorator: compute with torch's first settings whatever the caller set, and restore those.

    They are the default type and device, autocast, gradients, deterministic algorithms, oneDNN, and the precision of
    products of float32.
    """
    with ExitStack() as restored:
        for module in _precisions():
            restored.callback(setattr, module, "fp32_precision", module.fp32_precision)
        # torch refuses to read these two if the caller set a part of them by the names above, which restore all.
        with suppress(RuntimeError):
            restored.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        with suppress(RuntimeError):
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for module in _precisions():
            module.fp32_precision = "none"
        # After them, or torch finds that they contradict each other. On a GPU `fix` sets those of the experiment.
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        restored.callback(
            _use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        restored.callback(setattr, _filling, "fill_uninitialized_memory", _filling.fill_uninitialized_memory)
        restored.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        _use_deterministic_algorithms(False, warn_only=False)
        onednn: Foreign = torch.backends.mkldnn
        if hasattr(onednn, "enabled"):
            restored.callback(setattr, onednn, "enabled", onednn.enabled)
            onednn.enabled = onednn.is_available()
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                restored.enter_context(torch.autocast(device, enabled=False))
        # Before 2.7 torch.get_default_device does not know of `with torch.device`.
        if torch.empty(0).device.type != "cpu":
            restored.enter_context(torch.device("cpu"))
        yield


@contextmanager
def fixed(threads: int, device: torch.device, precision: ArithmeticPrecision = "fp32") -> Iterator[None]:
    """`own_flags` and `fix` for a while; the caller's flags and thread count are restored afterwards."""
    before = torch.get_num_threads()
    with own_flags():
        fix(threads, device, precision)
        try:
            yield
        finally:
            torch.set_num_threads(before)
