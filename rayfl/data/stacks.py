"""Makes the batches of a stack of clients. All indices of a stage are copied to the device at once."""

from collections.abc import Sequence

import numpy as np
import torch

from rayfl.data.batches import Batch, Order
from rayfl.data.datasets import cropped
from rayfl.data.device import DeviceData, upload
from rayfl.tree import ALIGNMENT_BYTES

ALIGNED = ALIGNMENT_BYTES // 4
"""Distance of aligned float32 numbers in memory, in numbers."""


class StackBatches:
    """The batches of all clients of a stack for every step, [width, size, ...], made on the device when needed.

    A smaller batch is filled with the client's first example at weight 0, a client without steps left repeats its last
    one, and a stack of fewer clients than `width` repeats its first client.
    """

    def __init__(
        self,
        store: DeviceData,
        split: str,
        orders: Sequence[Order],
        *,
        width: int,
        size: int | None = None,
        batches_per_step: int = 1,
    ) -> None:
        """`size`: examples of a full batch; None: those of the largest batch, no weights if all sizes are equal."""
        self.store = store
        self.examples = store.split(split)
        self.group = batches_per_step
        orders = [*orders, *[orders[0]] * (width - len(orders))]
        num_batches = np.array([len(order.positions) for order in orders])
        self.num_steps = int(num_batches.max()) // batches_per_step
        sizes = np.array([batch_size for order in orders for batch_size in order.sizes])
        self.width = width
        self.size = size or int(sizes.max())
        unfinished = np.less(np.arange(self.num_steps)[:, None], num_batches // batches_per_step)
        self._everyone = [bool(row.all()) for row in unfinished]
        self._active = upload(unfinished, store.device)
        batches = np.arange(self.num_steps * batches_per_step)[:, None]
        first = np.cumsum(num_batches) - num_batches
        # Each client's batch, numbered among those of all clients, [num_batches, width].
        chosen = first + np.where(
            batches < num_batches, batches, num_batches - batches_per_step + batches % batches_per_step
        )
        place, starts = np.arange(self.size), np.cumsum(sizes) - sizes
        held = place < sizes[chosen][:, :, None]
        self._samples = np.where(held, starts[chosen][:, :, None] + place, starts[first][:, None])
        self._rows = self.examples.order(self._filled([order.rows for order in orders]))
        self._crops = None
        if orders[0].crops:
            crops = [np.concatenate(order.crops or (), axis=1) for order in orders]
            parts = [self._filled([crop[part] for crop in crops]) for part in range(3)]
            self._crops = upload(np.stack(parts, axis=1), store.device)
        weighted = size is not None or sizes.min() < self.size
        self._weights = upload(self._weighted(held), store.device) if weighted else None

    def active(self, step: int) -> torch.Tensor | None:
        """Which clients have this step, bool [width] on the device; None if all have it."""
        return None if self._everyone[step] else self._active[step]

    def numbers(self, step: int) -> tuple[torch.Tensor | None, ...]:
        """What `batch_of` makes a step's batches from: rows, crops and weights of each."""
        tables = (self._rows, self._crops, self._weights)
        parts = range(step * self.group, (step + 1) * self.group)
        return tuple(None if table is None else table[part] for part in parts for table in tables)

    def batch_of(self, numbers: Sequence[torch.Tensor | None]) -> Batch | tuple[Batch, ...]:
        """The batch, or batches, of the `numbers` of a step: of any stage with the same split, width and size."""
        batches = tuple(self._batch(*numbers[first : first + 3]) for first in range(0, 3 * self.group, 3))
        return batches[0] if self.group == 1 else batches

    def _batch(self, rows: torch.Tensor | None, crops: torch.Tensor | None, weights: torch.Tensor | None) -> Batch:
        assert rows is not None
        raw, labels = self.examples.take(rows)
        inputs = self.store.normalise(raw if crops is None else cropped(raw, crops))
        stacked = (self.width, self.size)
        if weights is not None:
            weights = weights[: self.width * self.size].view(stacked)
        return Batch(inputs.view(*stacked, *inputs.shape[1:]), labels.view(*stacked, *labels.shape[1:]), weights)

    def _filled(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Each client's `values`, one per sample of its batches, as int64 [num_batches, width * size]."""
        return np.concatenate(values)[self._samples].astype(np.int64, copy=False).reshape(len(self._samples), -1)

    def _weighted(self, held: np.ndarray) -> torch.Tensor:
        """float32 [num_batches, at least width * size]: 1 for examples, 0 for padding; batches are aligned."""
        weights = torch.from_numpy(held.reshape(len(held), -1)).float()
        return torch.nn.functional.pad(weights, (0, -weights.shape[1] % ALIGNED))
