"""The builds and the hardware on which a run's numbers depend; platform.json records them."""

import os
import platform
from importlib.metadata import version

import numpy as np
import torch

import rayfl

DECISIVE = ("torch", "numpy", "system", "cpu_capability", "mkl_cbwr", "gpu", "threads_per_actor")
"""The entries that must be equal for equal bits."""


def describe(threads: int) -> dict[str, object]:
    """Builds and hardware of this process, as plain values for JSON."""
    return {
        "rayfl": rayfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "ray": version("ray"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "threads_per_actor": threads,
    }
