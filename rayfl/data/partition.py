"""Partition: which client has which examples. PartitionScheme: assigns examples to clients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from rayfl.choices.kinds import Choice
from rayfl.data.datasets import Dataset, Field, RayflError


@dataclass(frozen=True, eq=False)
class Shards:
    """The examples of every client as one index array, so that a million clients cost two arrays.

    indices: int64, client after client; offsets: int64 [num_clients + 1], the first entry of each client.
    """

    indices: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, client: int) -> np.ndarray:
        """The example indices of a client, as a view."""
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> "tuple[type[Shards], tuple[np.ndarray, np.ndarray]]":
        return Shards, (self.indices, self.offsets)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Examples of each client, int64 [num_clients]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of `indices`, int64."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def of_clients(self, clients: np.ndarray) -> "Shards":
        """Shards of some clients, int64 [n], which get the numbers 0, 1, ... in the given order."""
        sizes = self.sizes[clients]
        ends = np.cumsum(sizes)
        entries = np.arange(ends[-1]) + np.repeat(self.offsets[clients] - ends + sizes, sizes)
        return self.cut(self.indices[entries], sizes)

    @classmethod
    def cut(cls, indices: np.ndarray, sizes: np.ndarray | Sequence[int]) -> "Shards":
        """Shards from all examples, client after client, and the number of examples of each client."""
        return cls(indices.astype(np.int64, copy=False), np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def even(cls, indices: np.ndarray, num_clients: int) -> "Shards":
        """Shards from all examples in equal parts; the first ones have one more example if they must."""
        size, more = divmod(len(indices), num_clients)
        return cls.cut(indices, size + (np.arange(num_clients) < more))

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> "Shards":
        """Shards from one index array per client."""
        return cls.cut(np.concatenate([np.empty(0, np.int64), *lists]), [len(indices) for indices in lists])

    @classmethod
    def per_owner(cls, indices: np.ndarray, owners: np.ndarray, num_clients: int) -> "Shards":
        """Shards from the owner of each example; a client's examples end up in ascending order."""
        # One sort of numbers is faster than one of pairs.
        bound = int(indices.max(initial=0)) + 1
        ordered = np.sort(owners.astype(np.int64) * bound + indices) % bound
        return cls.cut(ordered, np.bincount(owners, minlength=num_clients))

    @classmethod
    def empty(cls, num_clients: int) -> "Shards":
        """Shards without examples."""
        return cls(np.empty(0, np.int64), np.zeros(num_clients + 1, np.int64))


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of each client in the four splits.

    train, validation and heldout index `dataset.train` and are disjoint; test indexes `dataset.test`.
    """

    train: Shards
    validation: Shards
    heldout: Shards
    test: Shards

    def split(self, name: str) -> Shards:
        """The shards of the split called `name`."""
        return {"train": self.train, "validation": self.validation, "heldout": self.heldout, "test": self.test}[name]

    def hold_out(self, validation_ratio: float, heldout_ratio: float, generator: np.random.Generator) -> "Partition":
        """A partition whose validation and heldout splits are cut at random from each client's train examples.

        A ratio in (0, 1) takes the nearest whole number of examples, and at least one; 0 takes none. Raise RayflError
        if a client would keep no train example.
        """
        sizes, owners = self.train.sizes, self.train.owners
        num_validation, num_heldout = _cut(sizes, validation_ratio), _cut(sizes, heldout_ratio)
        if len(short := np.flatnonzero(sizes - num_validation - num_heldout < 1)):
            raise RayflError(
                f"client {short[0]} has {sizes[short[0]]} train examples and would keep none after validation_ratio="
                f"{validation_ratio} and heldout_ratio={heldout_ratio}: lower the ratios or clients.count"
            )
        if not validation_ratio and not heldout_ratio:
            train = Shards.per_owner(self.train.indices, owners, len(sizes))
            return replace(self, train=train, validation=Shards.empty(len(sizes)), heldout=Shards.empty(len(sizes)))
        order = np.lexsort((generator.random(len(owners)), owners))
        rank = np.empty(len(owners), np.int64)
        rank[order] = np.arange(len(owners)) - self.train.offsets[owners]
        is_validation = rank < num_validation[owners]
        is_train = rank >= (num_validation + num_heldout)[owners]
        train, validation, heldout = (
            Shards.per_owner(self.train.indices[chosen], owners[chosen], len(sizes))
            for chosen in (is_train, is_validation, ~is_train & ~is_validation)
        )
        return Partition(train, validation, heldout, self.test)

    def with_last(self, clients: Sequence[int]) -> "Partition":
        """The same partition with clients renumbered: `clients` become the last ones. Both groups keep their order."""
        order = np.concatenate([np.setdiff1d(np.arange(len(self.train)), clients), np.sort(clients)])
        return Partition(**{split.name: getattr(self, split.name).of_clients(order) for split in fields(self)})


class PartitionScheme(Choice, ABC):
    """Base of the partitions that `[partition]` names: its fields are the options, `split` assigns examples."""

    label = "partition"
    package = "rayfl.data.partitions"
    renamed = {"counted": "assign"}
    by_class: ClassVar[bool] = False
    """Whether it needs one class for each example."""

    def assign(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> tuple[Dataset, Partition]:
        """The dataset whose examples are counted (another one if the partition chooses between train and test), and its
        partition. Raise RayflError as `split` does, and if the dataset does not fit the scheme or the clients."""
        if self.by_class and not dataset.has_classes:
            raise RayflError(
                f"partition {self.name!r} divides classes, and the labels of dataset {dataset.name!r} are "
                f"{dataset.train.labels.dtype} [n, {dataset.num_classes}], no classes; take 'iid', or 'natural' with "
                "owners"
            )
        if num_clients > len(dataset.train):
            raise RayflError(
                f"clients.count={num_clients} is more than the {len(dataset.train)} train examples of dataset "
                f"{dataset.name!r}, of which every client needs one: lower clients.count"
            )
        return dataset, self.split(dataset, num_clients, generator)

    @abstractmethod
    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign train and test examples to clients; validation and heldout are empty (`Partition.hold_out` cuts them).

        Raise RayflError if the numbers make the scheme impossible or leave a client without train data.
        """

    def finish(self, train: Shards, test: Shards, advice: str) -> Partition:
        """The partition. Raise RayflError, which ends with `advice`, if a client has no train data."""
        if len(without := np.flatnonzero(train.sizes == 0)):
            raise RayflError(
                f"partition {self.name!r} leaves client {without[0]} ({len(without)} of {len(train)} clients) "
                f"without train data: {advice}"
            )
        empty = Shards.empty(len(train))
        return Partition(train=train, validation=empty, heldout=empty, test=test)


class ByClass(PartitionScheme):
    """Base of the partitions that need one class for each example."""

    by_class = True


def _cut(sizes: np.ndarray, ratio: float) -> np.ndarray:
    return np.maximum(int(ratio > 0), np.floor(ratio * sizes + 0.5).astype(np.int64))


def label_counts(labels: np.ndarray, shards: Shards, num_classes: int) -> np.ndarray:
    """Examples of each class that each client holds; int64 [num_clients, num_classes]."""
    cells = shards.owners * num_classes + labels[shards.indices]
    return np.bincount(cells, minlength=len(shards) * num_classes).reshape(len(shards), num_classes)
