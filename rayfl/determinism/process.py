"""Sets up a process before torch computes: its memory allocator, and arithmetic that repeats bit for bit.

Every process that computes (driver, coordinator, client actors, tests) calls `prepare_process` first. This file imports
neither torch nor numpy: numpy and its OpenBLAS read the environment when they are loaded; MKL, oneDNN and ATen read it
when they are first used.
"""

import ctypes
import gc
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Literal

ArithmeticPrecision = Literal["fp32", "tf32", "bf16"]
"""How a model multiplies and convolves: in float32; on a GPU in TF32; or under autocast to bfloat16."""

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 30),
    "MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30),
    "MALLOC_TOP_PAD_": (-2, 64 << 20),
}
"""Numbers and values of glibc's `mallopt`, by the variables that have the same effect on a process at its start."""

COLLECTED_AFTER = 50_000
"""New objects after which Python looks for cycles of garbage. By default it looks after 700, and again and again at the
records of thousands of clients that a call keeps: a quarter of the time of small clients."""

_ALWAYS: dict[str, str | None] = {
    "MKL_CBWR": "AVX2,STRICT",
    # MKL obeys this variable even if MKL_CBWR is set.
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "ONEDNN_CPU_ISA_HINTS": "NO_HINTS",
    # ATen and oneDNN use all of the processor's instructions.
    "ONEDNN_MAX_CPU_ISA": "DEFAULT",
    "ATEN_CPU_CAPABILITY": None,
    "OPENBLAS_NUM_THREADS": "1",
    # Older names of oneDNN's variables, and those that numpy refuses beside NPY_DISABLE_CPU_FEATURES.
    "DNNL_MAX_CPU_ISA": None,
    "DNNL_DEFAULT_FPMATH_MODE": None,
    "DNNL_CPU_ISA_HINTS": None,
    "NPY_ENABLE_CPU_FEATURES": None,
    "NPY_DISABLE_CPU_FEATURES": None,
    "OPENBLAS_CORETYPE": None,
}
"""The variables that every process sets alike, whatever the user set; None: unset."""

_NUMPY_AT_AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    # The levels above AVX2: numpy's names since 2.4, and the names before.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}
"""Set if the processor has AVX2. numpy's part of rayfl's work is not slower with it."""

_NUMPY_IS_EARLIER = "numpy" in sys.modules and any(
    os.environ.get(name) != value for name, value in _NUMPY_AT_AVX2.items()
)
"""Whether numpy was loaded without these variables before this module, which `import rayfl` loads."""

_HEEDED = (
    "GLIBC_TUNABLES",
    "MKL_DISABLE_FAST_MM",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCH_LINEAR_FLATTEN_3D",
    "TORCH_MKLDNN_MATMUL_MIN_DIM",
    "TORCH_MKLDNN_MATMUL_MIN_SIZE",
)
"""Variables that may change bits, and that rayfl leaves as the user set them."""


def prepare_process() -> None:
    """Set up the allocator, the libraries of arithmetic and Python's collector. Calling it twice changes nothing.

    The variables that decide bits get fixed values, whatever the user's shell has set: equal bits depend on them. The
    allocator keeps freed memory, which activations need again in the next step. Otherwise the kernel would
    take the pages and clear new ones, which takes a third of the time of a small CNN.
    """
    for name, value in pinned().items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for parameter, value in ALLOCATOR.values():
        ctypes.CDLL(None).mallopt(parameter, value)
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])


def warn_if_late() -> None:
    """Warn if numpy was loaded before rayfl and may use instructions above AVX2, as no other process of rayfl does."""
    if _NUMPY_IS_EARLIER and any(instruction.startswith("avx512") for instruction in processor()[1]):
        warnings.warn(
            "numpy was imported before rayfl, so the bits of this process may not be those of `rayfl run`: begin with "
            "`import rayfl`",
            stacklevel=3,
        )


def hide_gpus() -> None:
    """Hide all GPUs from this process: Ray shows a node's GPUs even to an actor that asked for none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def variables() -> dict[str, str]:
    """The variables of this process that decide bits, as they are set."""
    return {name: os.environ[name] for name in sorted({*_ALWAYS, *_HEEDED}) if name in os.environ}


@cache
def processor() -> tuple[str, frozenset[str]]:
    """The processor's maker, name, family and model, and its instructions; both are empty if Linux names
    none."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    entries = {name.strip(): value.strip() for name, _, value in lines}
    family, model = entries.get("cpu family", ""), entries.get("model", "")
    named = [entries.get("vendor_id", ""), entries.get("model name", ""), family and f"family {family} model {model}"]
    arm = [f"{name} {entries[name]}" for name in ("CPU implementer", "CPU part", "CPU variant") if name in entries]
    return " ".join(filter(None, [*named, *arm])), frozenset(entries.get("flags", entries.get("Features", "")).split())


def pinned() -> dict[str, str | None]:
    """The variables that `prepare_process` sets, with their values; None: it unsets the variable."""
    return {**_ALWAYS, **(_NUMPY_AT_AVX2 if "avx2" in processor()[1] else {})}


def trim() -> None:
    """Give the memory that the allocator keeps back to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)
