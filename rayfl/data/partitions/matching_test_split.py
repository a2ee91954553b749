"""Test examples for each client in the shares of its train labels (Dis-PFL)."""

import numpy as np

from rayfl.data.partition import Dataset, Shards, label_counts


def matching_test_split(dataset: Dataset, train: Shards, num_samples: int, generator: np.random.Generator) -> Shards:
    """For each client ceil(share * num_samples) test examples of each label, where share is that of its train split
    (Dis-PFL).

    Drawn without replacement inside a client, independently across clients, which may share test examples. If the
    test set has too few of a label, `num_samples` shrinks for that client until all of its shares fit: the split
    stays like its train data (36 a class in `digits`, so a client with one class is tested on 36).
    """
    counts = label_counts(dataset.train.labels, train, dataset.num_classes)
    pools = [np.flatnonzero(dataset.test.labels == label) for label in range(dataset.num_classes)]
    supply = np.array([len(pool) for pool in pools])
    totals = np.maximum(counts.sum(axis=1), 1)
    fitting = np.where(counts > 0, supply * totals[:, None] / np.maximum(counts, 1), np.inf).min(axis=1)
    size = np.minimum(num_samples, fitting)
    # The 1e-9 because a share such as 0.07 * 100 is 7.000000000000001 in floats.
    quotas = np.ceil(counts / totals[:, None] * size[:, None] - 1e-9).astype(np.int64)
    taken = [
        pools[label][generator.choice(supply[label], quotas[client, label], replace=False, shuffle=False)]
        for client, label in np.argwhere(quotas)
    ]
    owners = np.repeat(np.arange(len(train)), quotas.sum(axis=1))
    return Shards.per_owner(np.concatenate([np.empty(0, np.int64), *taken]), owners, len(train))
