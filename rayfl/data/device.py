"""The samples of a dataset where a process computes: once, as they are, and made into batches there.

Whatever travels to a GPU does so from pinned memory and without waiting. torch keeps such memory until the copy is
done, so that the next copy gets another buffer.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rayfl.data.datasets import Dataset, Samples

RESIDENT_SHARE = 0.25
"""Share of a process's part of a GPU that a dataset's split may fill; a larger one stays in main memory."""


def upload(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array as a tensor on the device: itself where it lies there, a copy that nobody waits for on a GPU."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceSamples:
    """One split on a device, or in main memory where it is too large for it; raw, as `Samples` has it."""

    def __init__(self, samples: Samples, device: torch.device, most_bytes: float = float("inf")) -> None:
        """`most_bytes`: from which size on the samples stay in main memory."""
        inputs, labels = torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels)
        self.device = device
        self.home = device if inputs.nbytes + labels.nbytes <= most_bytes else torch.device("cpu")
        self.inputs, self.labels = upload(inputs, self.home), upload(labels, self.home)

    def order(self, rows: np.ndarray) -> Tensor:
        """Indices of samples as `take` wants them: uploaded once for all the batches of a stage."""
        return upload(rows, self.home)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Raw inputs [n, ...] and labels [n] of the `rows` [n], on the device."""
        inputs, labels = self.inputs.index_select(0, rows), self.labels.index_select(0, rows)
        if self.home == self.device:
            return inputs, labels
        return upload(inputs, self.device), upload(labels, self.device)


class DeviceData:
    """A dataset on a device. It is made once a process, and does not pickle: `Setup` leaves it behind."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.dataset, self.device = dataset, device

    @cached_property
    def train(self) -> DeviceSamples:
        """What all splits but the test split index."""
        return DeviceSamples(self.dataset.train, self.device, self._most_bytes)

    @cached_property
    def test(self) -> DeviceSamples:
        """What the test split indexes."""
        return DeviceSamples(self.dataset.test, self.device, self._most_bytes)

    def split(self, name: str) -> DeviceSamples:
        """The samples that the split called `name` indexes."""
        return self.test if name == "test" else self.train

    def of(self, samples: Samples) -> DeviceSamples:
        """The same samples: the dataset's `train` or its `test`."""
        return self.test if samples is self.dataset.test else self.train

    def normalise(self, inputs: Tensor) -> Tensor:
        """See `Dataset.normalise`; with several channels by constants that lie on the device already."""
        return self.dataset.normalise(inputs, self._constants)

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor] | None:
        return self.dataset.channel_constants(self.device)

    @property
    def _most_bytes(self) -> float:
        if self.device.type != "cuda":
            return float("inf")
        own = torch.cuda.get_per_process_memory_fraction(self.device)
        return RESIDENT_SHARE * own * torch.cuda.get_device_properties(self.device).total_memory
