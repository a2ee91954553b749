"""Keeps the examples of a dataset on the device that a process computes on, and makes batches there.

Copies to a GPU start in pinned memory, and the process does not wait for them. torch keeps such memory until the copy
is done, so that the next copy gets another buffer. Copies from a GPU end in pinned memory, and the process waits once
for several of them.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from rayfl.data.datasets import Dataset, Examples

RESIDENT_SHARE = 0.25
"""Share of a process's part of a GPU that a dataset's split may fill; a larger one stays in main memory."""


def upload(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device, copied only if it is elsewhere. Copies to a GPU run asynchronously."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    is_to_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if is_to_gpu else tensor.to(device)


def download(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one GPU in main memory. They are not left in pinned memory, of which there is little."""
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, source in zip(pinned, tensors, strict=True):
        copy.copy_(source, non_blocking=True)
    torch.cuda.synchronize(tensors[0].device)
    return [copy.clone() for copy in pinned]


class DeviceExamples:
    """The raw examples of one split on a device, or in main memory if they are too large for the device."""

    def __init__(self, examples: Examples, device: torch.device, most_bytes: float = float("inf")) -> None:
        """`most_bytes`: larger examples stay in main memory."""
        inputs, labels = torch.from_numpy(examples.inputs), torch.from_numpy(examples.labels)
        self.device = device
        self.home = device if inputs.nbytes + labels.nbytes <= most_bytes else torch.device("cpu")
        self.inputs, self.labels = upload(inputs, self.home), upload(labels, self.home)

    @property
    def is_resident(self) -> bool:
        """Whether the examples lie on the device."""
        return self.home == self.device

    def order(self, rows: np.ndarray) -> torch.Tensor:
        """Indices of examples for `take`, copied to the device once for all batches of a stage."""
        return upload(rows, self.home)

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw inputs [n, ...] and labels [n] of the `rows` [n], on the device."""
        inputs, labels = (upload(array.index_select(0, rows), self.device) for array in (self.inputs, self.labels))
        return inputs, labels


class DeviceData:
    """A dataset on a device. Each process makes its own: `Setup` does not pickle it."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.dataset = dataset
        self.device = device

    @cached_property
    def train(self) -> DeviceExamples:
        """The examples that all splits but the test split index."""
        return DeviceExamples(self.dataset.train, self.device, self._most_bytes)

    @cached_property
    def test(self) -> DeviceExamples:
        """The examples that the test split indexes."""
        return DeviceExamples(self.dataset.test, self.device, self._most_bytes)

    def split(self, name: str) -> DeviceExamples:
        """The examples that the split called `name` indexes."""
        return self.test if name == "test" else self.train

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `Dataset.normalise`; uses constants that are already on the device."""
        return self.dataset.normalise(inputs, self._constants)

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.dataset.channel_constants(self.device)

    @property
    def _most_bytes(self) -> float:
        if self.device.type != "cuda":
            return float("inf")
        # The index: torch takes no plain "cuda" here; None is the current GPU.
        share = torch.cuda.get_per_process_memory_fraction(self.device.index)
        return RESIDENT_SHARE * share * torch.cuda.get_device_properties(self.device).total_memory
