"""What a run uses of its machines: CPU and GPU time, memory, and the energy of GPUs. No result depends on it."""

import resource
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch


class Use(NamedTuple):
    """What a process has used so far. energy_j: joules of each GPU that it sees, by the GPU's number everywhere.

    A GPU's energy is that of all its processes; it is empty without NVML (the package nvidia-ml-py).
    """

    cpu_s: float
    gpu_s: float
    peak_bytes: int
    gpu_peak_bytes: int
    energy_j: Mapping[str, float]


class Meter:
    """Measures this process from now on. gpu_share: of a GPU that is reserved for it."""

    def __init__(self, device: torch.device, gpu_share: float | None = None) -> None:
        self._device = device
        self._gpu_share = float(device.type == "cuda") if gpu_share is None else gpu_share
        self._cpu_s, self._began, self._energy = time.process_time(), time.monotonic(), _energy(device)

    def read(self) -> Use:
        """What has been used since the beginning; the peaks are those of the process."""
        on_gpu = self._device.type == "cuda" and torch.cuda.is_available()
        return Use(
            cpu_s=time.process_time() - self._cpu_s,
            gpu_s=self._gpu_share * (time.monotonic() - self._began),
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            gpu_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
            energy_j={gpu: now - self._energy.get(gpu, now) for gpu, now in _energy(self._device).items()},
        )


def _energy(device: torch.device) -> dict[str, float]:
    """The joules that each visible GPU has taken since its driver was loaded; {} if NVML is not there."""
    if device.type != "cuda":
        return {}
    # Any: the package has no types, and a GPU may count no energy.
    with suppress(Exception):
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()) for uuid in uuids}
        return {uuid: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 for uuid, handle in handles.items()}
    return {}


def totals(uses: Iterable[Use], before: Mapping[str, float]) -> dict[str, float]:
    """All processes together, added to what earlier plays of the run have used; peaks are those of the largest process.

    Hours of CPU and GPU, bytes, and if it was measured kilowatt-hours of GPUs.
    """
    together = [*uses]
    energy: dict[str, float] = {}
    for use in together:
        # Actors on one GPU see the same counter.
        energy |= {gpu: max(joules, energy.get(gpu, 0.0)) for gpu, joules in use.energy_j.items()}
    added = {
        "cpu_hours": sum(use.cpu_s for use in together) / 3600,
        "gpu_hours": sum(use.gpu_s for use in together) / 3600,
        **({"gpu_kilowatt_hours": sum(energy.values()) / 3.6e6} if energy else {}),
    }
    peaks = {
        "peak_bytes": float(max((use.peak_bytes for use in together), default=0)),
        "gpu_peak_bytes": float(max((use.gpu_peak_bytes for use in together), default=0)),
    }
    return {
        **{name: value + before.get(name, 0.0) for name, value in added.items()},
        **{name: max(value, before.get(name, 0.0)) for name, value in peaks.items()},
    }
