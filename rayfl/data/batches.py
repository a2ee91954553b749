"""The seeded batch schedule of one client, and the batches themselves."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rayfl.data.datasets import Dataset, RayflError, cropped, draw_crops
from rayfl.data.device import DeviceData, DeviceExamples, upload
from rayfl.data.partition import Partition

NORMALISED_BYTES = 64 << 20
"""A client's split is normalised at once up to this size (float32); larger splits batch by batch."""


class Batch(NamedTuple):
    """Examples of one step.

    inputs: [batch, ...]; labels: [batch]; weights: float32 [batch], 0 for padding (None = all ones).
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None

    def without_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the examples, [..., batch], times their weights: 0 for padding."""
        return values if self.weights is None else values * self.weights

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of values of the examples, [batch], without padding; a scalar."""
        return values.mean() if self.weights is None else (values * self.weights).sum() / self.weights.sum()


def first_two(dataset: Dataset) -> Batch:
    """The first two train examples, on which a model is tried before a run begins."""
    return Batch(
        dataset.normalise(torch.from_numpy(dataset.train.inputs[:2])), torch.from_numpy(dataset.train.labels[:2])
    )


def schedule(
    num_examples: int,
    *,
    epochs: int | None,
    steps: int | None,
    batch_size: int | None,
    batches_per_step: int = 1,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """The examples of each batch: int64 index arrays, one per batch and `batches_per_step` of them per step.

    Every epoch is a new permutation, cut into batches of `batch_size`; the last one may be smaller. `steps` may need
    several permutations. With `epochs` and several batches per step, an incomplete last step takes batches of one more
    permutation. `batch_size=None` is the full batch in order, without random draws.
    """
    num_steps, _ = amount(
        num_examples, epochs=epochs, steps=steps, batch_size=batch_size, batches_per_step=batches_per_step
    )
    if batch_size is None:
        return [np.arange(num_examples)] * (num_steps * batches_per_step)
    batches: list[np.ndarray] = []
    while len(batches) < num_steps * batches_per_step:
        order = generator.permutation(num_examples)
        batches.extend(order[start : start + batch_size] for start in range(0, num_examples, batch_size))
    return batches[: num_steps * batches_per_step]


def amount(
    num_examples: int,
    *,
    epochs: int | None,
    steps: int | None,
    batch_size: int | None,
    batches_per_step: int = 1,
    share: float = 1.0,
) -> tuple[int, int]:
    """The number of steps of a `schedule` and of their examples; with `share` < 1 of its first steps, at least one."""
    if (epochs is None) == (steps is None):
        raise RayflError(f"epochs={epochs} and steps={steps}: give exactly one of them")
    a_pass = 1 if batch_size is None else -(-num_examples // batch_size)
    num_steps = steps if epochs is None else -(-epochs * a_pass // batches_per_step)
    assert num_steps is not None
    num_steps = max(1, math.floor(share * num_steps + 0.5))
    passes, further = divmod(num_steps * batches_per_step, a_pass)
    return num_steps, passes * num_examples + further * (batch_size or 0)


def examples_by_batch(
    num_examples: int, num_steps: int, *, batch_size: int | None, batches_per_step: int
) -> tuple[int, ...]:
    """The examples of the first batches, of the second ones, and so on, in the first `num_steps` steps of a `schedule`:
    `batches_per_step` numbers, whose sum is that of `amount`.
    """
    a_pass = 1 if batch_size is None else -(-num_examples // batch_size)
    sizes = np.full(num_steps * batches_per_step, batch_size or num_examples)
    sizes[a_pass - 1 :: a_pass] = num_examples - (a_pass - 1) * (batch_size or 0)
    return tuple(sizes.reshape(num_steps, batches_per_step).sum(axis=0).tolist())


def steps_within(limit: int, num_examples: int, *, batch_size: int | None, batches_per_step: int = 1) -> int:
    """The number of first steps of a `schedule` whose batches together have at most `limit` examples."""
    passes, further = divmod(limit, num_examples)
    a_pass = 1 if batch_size is None else -(-num_examples // batch_size)
    return (passes * a_pass + further // (batch_size or num_examples)) // batches_per_step


@dataclass(frozen=True)
class Order:
    """A client's batches in one stage, as positions of examples.

    positions: of each batch, int64 [batch], in `indices`; indices: of the split in the dataset's examples, or of the
    part of the split that all passes are over.
    crops: `draw_crops` of each batch, if the stage is augmented.
    """

    positions: list[np.ndarray]
    indices: np.ndarray
    crops: list[np.ndarray] | None

    @property
    def sizes(self) -> list[int]:
        """Examples of each batch."""
        return [len(positions) for positions in self.positions]

    @property
    def rows(self) -> np.ndarray:
        """Indices of the dataset's examples in all batches, concatenated."""
        return self.indices[np.concatenate(self.positions)]


class ClientData:
    """One client's examples of a dataset as batches: `train`, `validation`, `heldout` and `test`.

    `store`: the examples on the device that makes the batches; by default the CPU. `num_clients`: the number of clients
    that may be stacked, the first ones; by default all.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        client: int,
        store: DeviceData | None = None,
        num_clients: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.client = client
        self.num_clients = num_clients
        self.store = store or DeviceData(dataset, torch.device("cpu"))

    def num_examples(self, split: str) -> int:
        """The number of examples that the client has in `split`."""
        return len(self.partition.split(split)[self.client])

    def most_examples(self, split: str) -> int:
        """The largest number of examples in `split` among the clients that may be stacked."""
        return int(self.partition.split(split).sizes[: self.num_clients].max())

    def all(self, split: str) -> Batch:
        """The whole split in one batch, in order and without augmentation. Raise RayflError if it is empty."""
        examples = self.store.split(split)
        inputs, labels = examples.take(examples.order(self._held(split)))
        return Batch(self.store.normalise(inputs), labels)

    def order(
        self,
        split: str,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        batches_per_step: int = 1,
        generator: np.random.Generator,
        num_steps: int | None = None,
        num_examples: int | None = None,
    ) -> Order:
        """The batches of `schedule`, or of its first `num_steps` steps; only the train split is cropped and flipped.

        With `num_examples` all passes are over this number of the split's examples, which are drawn first.

        Raise RayflError if the client has no example in `split`.
        """
        indices = self._held(split)
        if num_examples is not None and num_examples < len(indices):
            indices = indices[np.sort(generator.permutation(len(indices))[:num_examples])]
        positions = schedule(
            len(indices),
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            batches_per_step=batches_per_step,
            generator=generator,
        )
        if num_steps is not None:
            del positions[num_steps * batches_per_step :]
        augmented = self.dataset.augment and split == "train"
        crops = [draw_crops(len(batch), generator) for batch in positions] if augmented else None
        return Order(positions, indices, crops)

    # Any: what `order` takes.
    def batches(self, split: str, *, batches_per_step: int = 1, **options: Any) -> Iterator[Batch | tuple[Batch, ...]]:
        """Yield the batches of `order`: one per step, or a tuple per step if `batches_per_step` is above 1."""
        order = self.order(split, batches_per_step=batches_per_step, **options)
        size = 4 * len(order.indices) * math.prod(self.dataset.input_shape)
        alone = len(order.positions) == 1 or sum(order.sizes) < len(order.indices)
        singles = (self.batch_of(split, numbers) for numbers in self.numbers(split, order))
        # Not with augmentation, for large splits, or for steps that use few examples.
        if not (order.crops or size > NORMALISED_BYTES or alone):
            singles = self._normalised_once(self.store.split(split), order)
        return singles if batches_per_step == 1 else zip(*[singles] * batches_per_step, strict=True)

    def _held(self, split: str) -> np.ndarray:
        """Indices of the dataset's examples that the client has in `split`."""
        indices = self.partition.split(split)[self.client]
        if len(indices) == 0:
            raise RayflError(
                f"client {self.client} has no {split} examples: give the experiment a {split} split, or fewer clients"
            )
        return indices

    def _normalised_once(self, examples: DeviceExamples, order: Order) -> Iterator[Batch]:
        """Batches of inputs that are normalised at once: faster if all are used, with the same numbers."""
        inputs, labels = examples.take(examples.order(order.indices))
        inputs = self.store.normalise(inputs)
        for chosen in upload(np.concatenate(order.positions), self.store.device).split(order.sizes):
            yield Batch(inputs.index_select(0, chosen), labels.index_select(0, chosen))

    def numbers(self, split: str, order: Order) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """What `batch_of` makes each batch of an order from: rows and crops, which are copied to the device at once."""
        rows = self.store.split(split).order(order.rows).split(order.sizes)
        if not order.crops:
            return ((chosen, None) for chosen in rows)
        crops = upload(np.concatenate(order.crops, axis=1), self.store.device)
        return zip(rows, crops.split(order.sizes, dim=1), strict=True)

    def batch_of(self, split: str, numbers: Sequence[torch.Tensor | None]) -> Batch:
        """A batch of a split's examples, cropped and normalised, from its `numbers`."""
        rows, crops = numbers
        assert rows is not None
        inputs, labels = self.store.split(split).take(rows)
        return Batch(self.store.normalise(inputs if crops is None else cropped(inputs, crops)), labels)
