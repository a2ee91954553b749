"""Set a process up before torch computes: its memory allocator, and arithmetic that repeats itself bit for bit.

Every process that does numbers (driver, coordinator, client actors, tests) calls `prepare_process` first. No torch and
no numpy is imported here: numpy and its OpenBLAS read the environment as they are loaded; MKL, oneDNN and ATen, when
they are used for the first time.
"""

import ctypes
import os
import platform
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Literal

InstructionSet = Literal["native", "avx2"]
"""How far ATen and oneDNN may go: to what the processor has, or to AVX2, which costs a CNN about half as much again."""

Precision = Literal["fp32", "tf32", "bf16"]
"""Of products and convolutions in a model: float32; on a GPU its factors rounded to TF32; or autocast to bfloat16."""

_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 30),
    "MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30),
    "MALLOC_TOP_PAD_": (-2, 64 << 20),
}
"""Numbers and values of glibc's `mallopt`, by the variables that say the same to a process as it starts."""

_ALWAYS: dict[str, str | None] = {
    "MKL_CBWR": "AVX2,STRICT",
    # MKL obeys this one even where MKL_CBWR is set.
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "ONEDNN_CPU_ISA_HINTS": "NO_HINTS",
    "OPENBLAS_NUM_THREADS": "1",
    # Older names of oneDNN's, and what numpy refuses beside NPY_DISABLE_CPU_FEATURES.
    "DNNL_MAX_CPU_ISA": None,
    "DNNL_DEFAULT_FPMATH_MODE": None,
    "DNNL_CPU_ISA_HINTS": None,
    "NPY_ENABLE_CPU_FEATURES": None,
    "NPY_DISABLE_CPU_FEATURES": None,
    "OPENBLAS_CORETYPE": None,
}
"""The variables on which every process agrees; None: not set. The user's own values do not count."""

_NUMPY_AT_AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    # The levels above AVX2, as numpy calls them from 2.4 on, and as it called them before.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}
"""Where the processor has AVX2. What numpy does for rayfl takes no longer for it."""

_LEVELS: dict[InstructionSet, dict[str, str | None]] = {
    "native": {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "ATEN_CPU_CAPABILITY": None},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}

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
"""Variables that may change bits and stay as the user set them."""


def prepare_process(instruction_set: InstructionSet = "native") -> None:
    """Set up the allocator and the libraries of arithmetic. Calling it twice changes nothing.

    The variables that decide bits take fixed values, whatever the user's shell says: promise 1 of the design rests on
    them. The allocator keeps freed memory, which activations need again at the next step: without it the kernel takes
    the pages and clears new ones, a third of the time of a small CNN.
    """
    for name, value in _pinned(instruction_set).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    libc = _libc()
    if hasattr(libc, "mallopt"):
        for number, value in _ALLOCATOR.values():
            libc.mallopt(number, value)


def environment(prepared: bool) -> dict[str, str]:
    """This process's environment for a program that does not know rayfl.

    `prepared`: with all that `prepare_process` sets, the allocator included; else with nothing of it.
    """
    pinned = _pinned("native")
    others = {name: value for name, value in os.environ.items() if name not in pinned}
    if not prepared:
        return others
    allocator = {name: str(value) for name, (_, value) in _ALLOCATOR.items()}
    return {**others, **{name: value for name, value in pinned.items() if value is not None}, **allocator}


def warn_if_late() -> None:
    """Warn where numpy is loaded already and may use instructions above AVX2, which no other process of rayfl uses."""
    prepared = all(os.environ.get(name) == value for name, value in _NUMPY_AT_AVX2.items())
    above = any(one.startswith("avx512") for one in processor()[1])
    if "numpy" in sys.modules and above and not prepared:
        warnings.warn(
            "numpy was imported before rayfl was used, so the bits of this process may not be those of `rayfl run`: "
            "begin with `from rayfl import run, load`, or what is needed of it",
            stacklevel=3,
        )


def hide_gpus() -> None:
    """Let this process see no GPU: Ray leaves all of a node's visible to an actor that asked for none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def variables() -> dict[str, str]:
    """The variables of this process that decide bits, as they are set."""
    names = sorted({*_ALWAYS, *_LEVELS["native"], *_HEEDED})
    return {name: os.environ[name] for name in names if name in os.environ}


@cache
def processor() -> tuple[str, frozenset[str]]:
    """The processor's maker, name, family and model, and the instructions it has; both are empty where Linux names
    none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor(), frozenset()
    entries = dict[str, str]()
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    family, model = entries.get("cpu family", ""), entries.get("model", "")
    named = [entries.get("vendor_id", ""), entries.get("model name", ""), family and f"family {family} model {model}"]
    arm = [f"{key} {entries[key]}" for key in ("CPU implementer", "CPU part", "CPU variant") if key in entries]
    flags = entries.get("flags", entries.get("Features", ""))
    return " ".join(filter(None, [*named, *arm])), frozenset(flags.split())


def _pinned(instruction_set: InstructionSet) -> dict[str, str | None]:
    at_avx2 = _NUMPY_AT_AVX2 if "avx2" in processor()[1] else {}
    return {**_ALWAYS, **at_avx2, **_LEVELS[instruction_set]}


def trim() -> None:
    """Give the memory that the allocator keeps back to the kernel, where the C library can."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL:
    """The C library that this process runs on."""
    return ctypes.CDLL(None)
