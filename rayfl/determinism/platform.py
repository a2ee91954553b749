"""The builds and the hardware on which a run's numbers depend; platform.json records them.

An entry is decisive if it changes bits, or if nobody has shown that it does not. Runs, actors and resumes with
different decisive entries are not mixed. The processor's model is decisive even if the instruction sets are pinned:
oneDNN may choose its blocks, and so the order of its additions, by the caches. Python, Ray, rayfl and the number of
cores are recorded, but are not decisive.
"""

import json
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from rayfl.determinism.process import processor, variables
from rayfl.version import __version__

ON_CPU = (
    "torch",
    "numpy",
    "zlib",
    "system",
    "libc",
    "cpu",
    "cpu_instructions",
    "cpu_capability",
    "numpy_instructions",
    "variables",
)
"""The entries that decide a process's results on its processor, such as a run's first parameters."""
_ON_GPU = ("gpu", "gpu_processors", "gpu_threads_percent", "cuda", "cudnn", "gpu_driver")
DECISIVE = (*ON_CPU, *_ON_GPU, "threads_per_actor")
"""The entries that must be equal for equal bits. Those of a GPU are None if a process does not use one."""

_RELEVANT = ("fma", "f16c", "avx", "amx", "bf16", "i8mm", "asimd", "sve")
"""The first letters of instruction sets by which arithmetic libraries may choose code."""

Platform = Mapping[str, object]
"""Entries by name, as `describe` returns them."""


def describe(threads: int, device: str = "cpu") -> dict[str, object]:
    """Builds and hardware of this process, which computes on `device` ("cpu" or "cuda"), as plain values for JSON.

    A GPU is queried only if the process computes on one.
    """
    name, instructions = processor()
    on_gpu = device == "cuda"
    return {
        "rayfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        # Its build decides how many bits `lossless` sends.
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "ray": _ray_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cores": os.cpu_count(),
        "cpu": name,
        "cpu_instructions": " ".join(
            sorted(instruction for instruction in instructions if instruction.startswith(_RELEVANT))
        ),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        # The levels that numpy uses here, above the level that it was built for.
        "numpy_instructions": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])),
        "variables": variables(),
        "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
        # A part of a GPU (MIG, MPS) has fewer of them, by which libraries choose their kernels.
        "gpu_processors": torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else None,
        "gpu_threads_percent": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "gpu_driver": _gpu_driver() if on_gpu else None,
        "threads_per_actor": threads,
    }


def _ray_version() -> str:
    """Ray's version; "none" if it is not installed, which a run in one process does not need."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "none"


def differences(before: Platform, here: Platform, keys: Sequence[str] = DECISIVE) -> list[str]:
    """The decisive entries in which `here` differs from `before`, each as "key=old, and here key=new"."""
    changes = []
    for key in keys:
        old, new = before.get(key), here.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, sorted({*old, *new}))
        elif old != new:
            changes.append(f"{key}={old}, and here {key}={new}")
    return changes


def listed(unlike: Sequence[str]) -> str:
    """The first two differences, and the number of the others."""
    return "; ".join(unlike[:2]) + (f" (and {len(unlike) - 2} more differences)" if len(unlike) > 2 else "")


def with_kind(recorded: Platform, other: Platform) -> dict[str, object]:
    """The content of platform.json after machines like `other` have worked too; "mixed" lists their differences.

    `recorded`: the content before; {}: nothing has worked yet.
    """
    if not recorded:
        return {**other}
    entries = {key: other.get(key) for key in DECISIVE if recorded.get(key) != other.get(key)}
    kinds = kinds_besides(recorded)
    return {**recorded} if not entries or entries in kinds else {**recorded, "mixed": [*kinds, entries]}


def with_driver(recorded: Platform, driver: Platform) -> dict[str, object]:
    """The content of platform.json if `driver`, maybe of another kind, prepared the data and first parameters."""
    entries = {key: driver.get(key) for key in ON_CPU if recorded.get(key) != driver.get(key)}
    without = {key: value for key, value in recorded.items() if key != "driver"}
    return {**without, "driver": entries} if entries else without


def of_driver(recorded: Platform) -> dict[str, object]:
    """The entries of the process that prepared the run."""
    entries = recorded.get("driver")
    return {**recorded, **entries} if isinstance(entries, Mapping) else {**recorded}


def kinds_besides(recorded: Platform) -> list[Platform]:
    """The other kinds of machine that have worked on a run, by the entries in which they differ."""
    kinds = recorded.get("mixed")
    return kinds if isinstance(kinds, list) else []


def commonest(platforms: Sequence[Platform]) -> Platform:
    """The most frequent kind of machine, independent of the order; `platforms` has at least one."""
    written = [json.dumps([machine.get(key) for key in DECISIVE], sort_keys=True) for machine in platforms]
    return platforms[written.index(min(set(written), key=lambda kind: (-written.count(kind), kind)))]


def _gpu_driver() -> str | None:
    version_of_module = Path("/sys/module/nvidia/version")
    return version_of_module.read_text(encoding="ascii").strip() if version_of_module.exists() else None
