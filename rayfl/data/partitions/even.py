"""Splits into equal parts: iid, and FedPSE's lambda split, which ranges from iid to sorted by label."""

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset
from rayfl.data.partition import Partition, PartitionScheme, Shards


class Iid(PartitionScheme):
    """All samples, shuffled and cut into equal parts (sizes differ by at most one); the test samples likewise."""

    name = "iid"

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the samples. Raise RayflError if there are more clients than train samples."""
        train = Shards.even(generator.permutation(len(dataset.train)), num_clients)
        test = Shards.even(generator.permutation(len(dataset.test)), num_clients)
        return self.finish(train, test, f"there are {len(dataset.train)} train samples, so lower clients.count")


class LambdaRatio(PartitionScheme):
    """The split of FedPSE; `ratio` is its lambda: 0 is iid, 1 gives each client one run of labels.

    A random fraction `ratio` of the samples is sorted by label and cut into num_clients consecutive equal blocks; the
    rest is cut into num_clients random equal blocks; client i holds the i-th of both. The test samples likewise.
    """

    name = "lambda-ratio"
    by_class = True
    ratio: float = Field(
        ge=0.0,
        le=1.0,
        examples=[0.5],
        description="share of the samples that is split by label, FedPSE's lambda; 0 is iid",
    )

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the samples. Raise RayflError if there are too few train samples for the clients."""
        train = self._blocks(dataset.train.labels, num_clients, generator)
        test = self._blocks(dataset.test.labels, num_clients, generator)
        return self.finish(train, test, f"there are {len(dataset.train)} train samples, so lower clients.count")

    def _blocks(self, labels: np.ndarray, num_clients: int, generator: np.random.Generator) -> Shards:
        order = generator.permutation(len(labels))
        num_sorted = int(self.ratio * len(labels) + 0.5)
        by_label = order[:num_sorted][np.argsort(labels[order[:num_sorted]], kind="stable")]
        rest = Shards.even(order[num_sorted:], num_clients)
        # Reversed: if sizes are uneven, a larger block of one cut is joined with a smaller block of the other.
        owners = np.concatenate([Shards.even(by_label, num_clients).owners, num_clients - 1 - rest.owners])
        samples = np.concatenate([by_label, rest.indices])[np.argsort(owners, kind="stable")]
        return Shards.cut(samples, np.bincount(owners, minlength=num_clients))
