"""A partition as a table, for `rayfl data`."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from rayfl.data.datasets import Dataset
from rayfl.data.partition import Partition, label_counts

SPLITS = ("train", "validation", "heldout", "test")


def holdings(dataset: Dataset, partition: Partition) -> np.ndarray:
    """Train examples of each class that each client holds, int64 [num_clients, num_classes].

    Of several labels each, the examples that have each label. Of numbers to predict, the classes are tenths by the
    first one: class 0 has the lowest tenth of all examples. Following tokens have one class.
    """
    labels = dataset.train.labels
    if dataset.has_classes:
        return label_counts(labels, partition.train, dataset.num_classes)
    if not _are_labels(labels):
        tenths = np.searchsorted(np.quantile(labels[:, 0], np.arange(1, 10) / 10), labels[:, 0])
        return label_counts(tenths, partition.train, 10)
    are_tokens = dataset.kind == "text" and labels.shape == dataset.train.inputs.shape
    has_label = np.ones((len(labels), 1), bool) if are_tokens else labels != 0
    return np.stack([has_label[partition.train[client]].sum(axis=0) for client in range(len(partition.train))])


def _are_labels(labels: np.ndarray) -> bool:
    """Whether labels with a second axis are no numbers to predict: whole ones, or 0 and 1 alone, as in tables."""
    return labels.dtype.kind != "f" or bool(np.isin(labels, (0, 1)).all())


def distances(counts: np.ndarray) -> np.ndarray:
    """Total variation distance of each client's label distribution to the pooled one, float64 [num_clients] in [0, 1].

    counts: [num_clients, num_classes]; a row without any is as far from all others as one with other labels.
    """
    sums = np.maximum(1, counts.sum(axis=1, keepdims=True))
    return 0.5 * np.abs(counts / sums - counts.sum(axis=0) / max(1, counts.sum())).sum(axis=1)


def table(dataset: Dataset, partition: Partition, max_rows: int = 100, unseen: Sequence[int] = ()) -> Table:
    """A rich table with a row per client: sizes of the splits in use, label counts, distance to the pooled labels.

    Beyond `max_rows` clients the first ones are shown, and the caption says how many are left out. The last
    ones are marked as unseen, with their numbers `unseen` in the partition.
    """
    counts = holdings(dataset, partition)
    far = distances(counts)
    splits = {split: shards for split in SPLITS if (shards := partition.split(split)).sizes.any()}
    left_out = len(counts) - max_rows
    result = Table(
        title=f"{dataset.name}: {len(counts)} clients" + f", {left_out} of them not shown" * (left_out > 0),
        caption="labels: class:count in the train split, most frequent first (of numbers, tenths from 0, the lowest, "
        "to 9); distance: total variation between a client's train labels and those of all clients, from 0 (alike) to "
        "1 (disjoint)",
        show_footer=True,
    )
    footers = {"client": "all"} | {split: _sum_text(shards.indices) for split, shards in splits.items()}
    for head, footer in {**footers, "classes": str(np.count_nonzero(counts.sum(axis=0)))}.items():
        result.add_column(head, footer=footer, justify="right")
    result.add_column("labels", footer=_label_text(dataset, counts.sum(axis=0)), overflow="fold", ratio=1)
    result.add_column("distance", footer=f"mean {far.mean():.2f}", justify="right")
    for client in range(min(max_rows, len(counts))):
        index = client - len(counts) + len(unseen)
        name = f"{client} unseen ({unseen[index]} in the partition)" if index >= 0 else str(client)
        name += _owner_text(dataset, client, partition.train[client])
        numbers = [*(shards.sizes[client] for shards in splits.values()), np.count_nonzero(counts[client])]
        result.add_row(name, *map(str, numbers), _label_text(dataset, counts[client]), f"{far[client]:.2f}")
    return result


def _sum_text(indices: np.ndarray) -> str:
    """The number of examples of all clients, and how many are different if clients share some."""
    distinct = len(np.unique(indices))
    return str(len(indices)) if distinct == len(indices) else f"{len(indices)} ({distinct} different)"


def _owner_text(dataset: Dataset, client: int, examples: np.ndarray) -> str:
    """The owner of a client's examples, if all have one whose name is not the client's number."""
    if not dataset.owners or dataset.train.groups is None:
        return ""
    groups = np.unique(dataset.train.groups[examples])
    owner = dataset.owners[groups[0]] if len(groups) == 1 else str(client)
    return "" if owner == str(client) else f" ({owner})"


def _label_text(dataset: Dataset, counts: np.ndarray) -> str:
    """The classes held, the most frequent first, at most twelve of them."""
    name = dataset.class_name if _are_labels(dataset.train.labels) else str
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    text = " ".join(f"{name(label)}:{counts[label]}" for label in order[:12])
    return text + f" and {len(order) - 12} more" * (len(order) > 12)
