"""Splits by label: a few classes a client (pathological, the agents of MCE-PL), or FedPSE's lambda."""

import numpy as np

from rayfl.data.partition import ByClass, Dataset, Field, Partition, RayflError, Shards
from rayfl.data.partitions.assign_by_prior import assign_by_prior, even_sizes
from rayfl.data.partitions.matching_test_split import matching_test_split


class Pathological(ByClass):
    """Each client holds examples of a few random classes in equal shares (Dis-PFL).

    Every client is to get the same number of examples, in equal parts from its classes, without replacement. If a class
    has run out, a client takes more of its other classes; if all of them have, it holds fewer examples.
    The reference code repeats examples across clients instead. Classes that nobody drew are not used. The test split
    follows the client's label shares (`matching_test_split`).
    """

    name = "pathological"
    classes_per_client: int = Field(default=2, ge=1, description="classes of each client")
    test_samples: int = Field(default=100, ge=1, description="test examples of each client")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if a client gets no examples or there are too few classes."""
        has_class = _draw_classes(self.name, self.classes_per_client, dataset, num_clients, generator)
        labels = dataset.train.labels
        train = assign_by_prior(labels, has_class.astype(np.float64), even_sizes(len(labels), num_clients), generator)
        test = matching_test_split(dataset, train, self.test_samples, generator)
        return self.finish(train, test, "lower clients.count or raise classes_per_client")


class LabelsPerClient(ByClass):
    """Each client draws some distinct classes at random (the agents of MCE-PL).

    The train examples of a class, shuffled, are divided equally over its holders; the last one takes the remainder.
    Classes that nobody drew are not used. Each client is tested on all test examples of its classes.
    used_ratio: fraction of each share that is used, rounded down; the code of MCE-PL uses 0.2.
    """

    name = "labels-per-client"
    labels_per_client: int = Field(ge=1, examples=[3], description="classes of each client")
    used_ratio: float = Field(default=1.0, gt=0.0, le=1.0, description="share of a client's examples that it uses")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if a client gets no examples or there are too few classes."""
        has_class = _draw_classes(self.name, self.labels_per_client, dataset, num_clients, generator)
        labels, test_labels = dataset.train.labels, dataset.test.labels
        indices = []
        owners = []
        for label in range(dataset.num_classes):
            holders = np.flatnonzero(has_class[:, label])
            if not len(holders):
                continue
            examples = generator.permutation(np.flatnonzero(labels == label))
            shares = np.full(len(holders), len(examples) // len(holders))
            shares[-1] += len(examples) % len(holders)
            used = np.floor(shares * self.used_ratio + 1e-9).astype(np.int64)
            starts = np.cumsum(shares) - shares
            within = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
            indices.append(examples[np.repeat(starts, used) + within])
            owners.append(np.repeat(holders, used))
        train = Shards.per_owner(np.concatenate(indices), np.concatenate(owners), num_clients)
        test = Shards.of([np.flatnonzero(has_class[client][test_labels]) for client in range(num_clients)])
        return self.finish(train, test, "lower clients.count or raise labels_per_client or used_ratio")


class LambdaRatio(ByClass):
    """The split of FedPSE; `ratio` is its lambda: 0 is iid, 1 gives each client one run of labels.

    A random fraction `ratio` of the examples is sorted by label and cut into num_clients consecutive equal blocks; the
    rest is cut into num_clients random equal blocks; client i holds the i-th of both. The test examples likewise.
    """

    name = "lambda-ratio"
    ratio: float = Field(
        ge=0.0,
        le=1.0,
        examples=[0.5],
        description="share of the examples that is split by label, FedPSE's lambda; 0 is iid",
    )

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if there are too few train examples for the clients."""
        train = self._blocks(dataset.train.labels, num_clients, generator)
        test = self._blocks(dataset.test.labels, num_clients, generator)
        return self.finish(train, test, f"there are {len(dataset.train)} train examples, so lower clients.count")

    def _blocks(self, labels: np.ndarray, num_clients: int, generator: np.random.Generator) -> Shards:
        order = generator.permutation(len(labels))
        num_sorted = int(self.ratio * len(labels) + 0.5)
        by_label = order[:num_sorted][np.argsort(labels[order[:num_sorted]], kind="stable")]
        rest = Shards.even(order[num_sorted:], num_clients)
        # Reversed: if sizes are uneven, a larger block of one cut is joined with a smaller block of the other.
        owners = np.concatenate([Shards.even(by_label, num_clients).owners, num_clients - 1 - rest.owners])
        examples = np.concatenate([by_label, rest.indices])[np.argsort(owners, kind="stable")]
        return Shards.cut(examples, np.bincount(owners, minlength=num_clients))


def _draw_classes(
    scheme: str, how_many: int, dataset: Dataset, num_clients: int, generator: np.random.Generator
) -> np.ndarray:
    """`how_many` distinct classes for each client, uniformly; bool [num_clients, num_classes]."""
    if how_many > dataset.num_classes:
        raise RayflError(
            f"partition {scheme!r} asks for {how_many} classes a client, but dataset {dataset.name!r} has "
            f"{dataset.num_classes}: give at most that many"
        )
    chosen = np.argsort(generator.random((num_clients, dataset.num_classes)), axis=1)[:, :how_many]
    has_class = np.zeros((num_clients, dataset.num_classes), bool)
    np.put_along_axis(has_class, chosen, True, axis=1)
    return has_class
