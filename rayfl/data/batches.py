"""The seeded batch schedule of one client, and the batches themselves."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfl.data.datasets import Dataset, Samples
from rayfl.data.partition import Partition

NORMALISED_BYTES = 64 << 20
"""A client's split is normalised at once up to this size (float32), and batch by batch beyond it."""


class Batch(NamedTuple):
    """Samples of one step.

    inputs: [batch, ...]; labels: [batch]; weights: float32 [batch], 0 for padding (None = all ones).
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None = None


def schedule(
    num_examples: int,
    *,
    epochs: int | None,
    steps: int | None,
    batch_size: int | None,
    batches_per_step: int = 1,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """The samples of each batch: int64 index arrays, one a batch, `batches_per_step` of them a step.

    Every epoch is a fresh permutation cut into runs of `batch_size`, the partial last run kept. `steps` goes on
    through further permutations. With `epochs` and several batches a step, an incomplete last step is completed from
    a further permutation. `batch_size=None` is the full batch in order, and draws nothing.
    """
    num_steps, _ = amount(
        num_examples, epochs=epochs, steps=steps, batch_size=batch_size, batches_per_step=batches_per_step
    )
    num_batches = num_steps * batches_per_step
    batches: list[np.ndarray] = []
    while len(batches) < num_batches:
        if batch_size is None:
            batches.append(np.arange(num_examples))
        else:
            order = generator.permutation(num_examples)
            batches.extend(order[start : start + batch_size] for start in range(0, num_examples, batch_size))
    return batches[:num_batches]


def amount(
    num_examples: int,
    *,
    epochs: int | None,
    steps: int | None,
    batch_size: int | None,
    batches_per_step: int = 1,
    share: float = 1.0,
) -> tuple[int, int]:
    """Steps of a `schedule` and examples in its batches; with a `share` below 1 its first steps, at least one."""
    _check(num_examples, epochs, steps, batch_size, batches_per_step)
    a_pass = 1 if batch_size is None else -(-num_examples // batch_size)
    num_steps = steps if epochs is None else -(-epochs * a_pass // batches_per_step)
    assert num_steps is not None
    num_steps = max(1, math.floor(share * num_steps + 0.5))
    passes, further = divmod(num_steps * batches_per_step, a_pass)
    return num_steps, passes * num_examples + further * (batch_size or 0)


def steps_within(limit: int, num_examples: int, *, batch_size: int | None, batches_per_step: int = 1) -> int:
    """The number of first steps of a `schedule` whose batches together have at most `limit` examples."""
    passes, further = divmod(limit, num_examples)
    a_pass = 1 if batch_size is None else -(-num_examples // batch_size)
    return (passes * a_pass + further // (batch_size or num_examples)) // batches_per_step


class ClientData:
    """One client's view of a dataset: `train`, `validation`, `heldout` and `test` samples as batches."""

    def __init__(self, dataset: Dataset, partition: Partition, client: int) -> None:
        self.dataset = dataset
        self.partition = partition
        self.client = client

    def num_examples(self, split: str) -> int:
        """The number of samples that the client has in `split`."""
        return len(self.partition.split(split)[self.client])

    def most_examples(self, split: str) -> int:
        """How many samples the largest of all clients has in `split`."""
        return int(self.partition.split(split).sizes.max())

    def all(self, split: str, device: str | torch.device = "cpu") -> Batch:
        """The whole split in one batch, in order and without augmentation. ValueError if it is empty."""
        samples, indices = self._held(split)
        inputs = self.dataset.normalise(_to_torch(samples.inputs[indices], device))
        return Batch(inputs, _to_torch(samples.labels[indices], device))

    def batches(
        self,
        split: str,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        batches_per_step: int = 1,
        generator: np.random.Generator,
        device: str | torch.device = "cpu",
    ) -> Iterator[Batch | tuple[Batch, ...]]:
        """The batches of `schedule`, one a step, or a tuple a step where `batches_per_step` is above 1.

        The order is drawn at the call; crops and flips as the batches are taken, and for the train split only.
        ValueError if the client has no sample in `split`.
        """
        samples, indices = self._held(split)
        plan = schedule(
            len(indices),
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            batches_per_step=batches_per_step,
            generator=generator,
        )
        augmented = self.dataset.augment and split == "train"
        size = 4 * len(indices) * math.prod(self.dataset.input_shape)
        if augmented or size > NORMALISED_BYTES or sum(map(len, plan)) < len(indices):
            singles = self._one_by_one(samples, indices, plan, generator if augmented else None, device)
        else:
            singles = self._normalised_once(samples, indices, plan, device)
        if batches_per_step == 1:
            return singles
        return zip(*[singles] * batches_per_step, strict=True)

    def _held(self, split: str) -> tuple[Samples, np.ndarray]:
        """The dataset's samples, and the indices of those that the client has in `split`."""
        indices = self.partition.split(split)[self.client]
        if len(indices) == 0:
            raise ValueError(
                f"client {self.client} has no {split} samples: give the experiment a {split} split, or fewer clients"
            )
        return self.dataset.test if split == "test" else self.dataset.train, indices

    def _normalised_once(
        self, samples: Samples, indices: np.ndarray, plan: list[np.ndarray], device: str | torch.device
    ) -> Iterator[Batch]:
        """Batches of inputs that are normalised at once: fast where all are used, and the numbers are the same."""
        inputs = self.dataset.normalise(_to_torch(samples.inputs[indices], device))
        labels = _to_torch(samples.labels[indices], device)
        for positions in plan:
            chosen = _to_torch(positions, device)
            yield Batch(inputs.index_select(0, chosen), labels.index_select(0, chosen))

    def _one_by_one(
        self,
        samples: Samples,
        indices: np.ndarray,
        plan: list[np.ndarray],
        generator: np.random.Generator | None,
        device: str | torch.device,
    ) -> Iterator[Batch]:
        """Batches normalised one by one: for augmentation, for large splits, and for steps that use few samples."""
        for positions in plan:
            rows = indices[positions]
            inputs = self.dataset.prepare(samples.inputs[rows], generator)
            yield Batch(inputs.to(device), _to_torch(samples.labels[rows], device))


def pad(batches_of_clients: Sequence[Batch], size: int | None = None) -> Batch:
    """One batch a client, stacked to [num_clients, size, ...] with weights 0 on the padding.

    Without a `size` it is that of the largest batch, and the weights stay None where nothing is padded and no batch has
    any.
    """
    sizes = [len(batch.labels) for batch in batches_of_clients]
    largest = size or max(sizes)
    first = batches_of_clients[0]
    if size is None and min(sizes) == largest and all(batch.weights is None for batch in batches_of_clients):
        inputs = torch.stack([batch.inputs for batch in batches_of_clients])
        return Batch(inputs, torch.stack([batch.labels for batch in batches_of_clients]))
    inputs = first.inputs.new_zeros((len(sizes), largest, *first.inputs.shape[1:]))
    labels = first.labels.new_zeros((len(sizes), largest))
    weights = torch.zeros((len(sizes), largest), device=first.inputs.device)
    for client, (count, batch) in enumerate(zip(sizes, batches_of_clients, strict=True)):
        inputs[client, :count] = batch.inputs
        labels[client, :count] = batch.labels
        weights[client, :count] = 1.0 if batch.weights is None else batch.weights
    return Batch(inputs, labels, weights)


def _to_torch(array: np.ndarray, device: str | torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _check(num_examples: int, epochs: int | None, steps: int | None, batch_size: int | None, group: int) -> None:
    if num_examples < 1:
        raise ValueError("there are no samples to make batches of: give the client data in this split")
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs} and steps={steps}: give exactly one of them")
    for key, value in (("epochs", epochs), ("steps", steps), ("batch_size", batch_size), ("batches_per_step", group)):
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} is below 1: give at least 1")
