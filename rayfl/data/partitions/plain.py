"""Splits that need no classes: into equal parts, and that of the data itself, one client per writer or device."""

from logging import WARNING

import numpy as np

from rayfl.data.partition import Dataset, Field, Partition, PartitionScheme, RayflError, Shards
from rayfl.errors import log_once


class Iid(PartitionScheme):
    """All examples, shuffled and cut into equal parts (sizes differ by at most one); the test examples likewise."""

    name = "iid"

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if there are more clients than train examples."""
        train = Shards.even(generator.permutation(len(dataset.train)), num_clients)
        test = Shards.even(generator.permutation(len(dataset.test)), num_clients)
        return self.finish(train, test, f"there are {len(dataset.train)} train examples, so lower clients.count")


class Natural(PartitionScheme):
    """One client per group of the dataset, in the order of the group numbers.

    Groups with fewer than `min_samples` examples (train and test together) or without train examples are dropped. With
    fewer clients than groups, a random choice of groups is used. A notice says how many groups and examples are left.
    """

    name = "natural"
    min_samples: int = Field(default=2, ge=1, description="samples below which a group is left out")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if the dataset has no groups, or fewer than `num_clients`."""
        train_groups, test_groups = dataset.train.groups, dataset.test.groups
        if train_groups is None or test_groups is None:
            raise RayflError(
                f"partition {self.name!r} needs an owner of each example, and dataset {dataset.name!r} has none: give "
                "owners (an array owners in the file, or data.owners of a table or image folders), "
                "or use 'iid' or 'dirichlet-client'"
            )
        groups, num_train = np.unique(train_groups, return_counts=True)
        num_test = np.searchsorted(sorted_test := np.sort(test_groups), groups, side="right")
        num_test -= np.searchsorted(sorted_test, groups, side="left")
        groups = groups[num_train + num_test >= self.min_samples]
        if num_clients > len(groups):
            raise RayflError(
                f"clients.count={num_clients}, but dataset {dataset.name!r} has {len(groups)} owners with at least "
                f"min_samples={self.min_samples} examples: give at most that many clients"
            )
        if num_clients < len(groups):
            groups = np.sort(generator.choice(groups, num_clients, replace=False))
        train, test = _members(train_groups, groups), _members(test_groups, groups)
        _note_left_out(dataset, train_groups, test_groups, len(groups), len(train.indices) + len(test.indices))
        return self.finish(train, test, "lower clients.count")


def _note_left_out(
    dataset: Dataset, train_groups: np.ndarray, test_groups: np.ndarray, num_clients: int, num_used: int
) -> None:
    """Log which owners and examples no client has. `num_used`: the train and test examples that clients have."""
    owners = np.unique(train_groups)
    is_stranger = np.isin(test_groups, owners, invert=True)
    strangers = np.unique(test_groups[is_stranger])
    total = len(train_groups) + len(test_groups) - np.count_nonzero(is_stranger)
    if num_clients < len(owners):
        log_once(
            WARNING,
            f"{dataset.name}: {num_clients} of {len(owners)} owners ({num_used} of {total} examples) are clients, by "
            "clients.count and partition.min_samples",
        )
    if len(strangers):
        log_once(
            WARNING,
            f"{dataset.name}: {np.count_nonzero(is_stranger)} of {len(test_groups)} test examples are from "
            f"{len(strangers)} owners without train examples: only the pooled test set has them",
        )


def _members(of_samples: np.ndarray, groups: np.ndarray) -> Shards:
    """The examples of each of the sorted `groups`."""
    position = np.minimum(np.searchsorted(groups, of_samples), len(groups) - 1)
    chosen = np.flatnonzero(groups[position] == of_samples)
    return Shards.per_owner(chosen, position[chosen], len(groups))
