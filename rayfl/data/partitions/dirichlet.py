"""Splits drawn from a Dirichlet distribution: priors of clients (Dis-PFL, Elastic) or shares of classes (Yurochkin)."""

from typing import Annotated

import numpy as np

from rayfl.data.partition import ByClass, Dataset, Field, Partition, RayflError, Shards
from rayfl.data.partitions.assign_by_prior import LEAST_SHARE, assign_by_prior, even_sizes, proportional_sizes
from rayfl.data.partitions.matching_test_split import matching_test_split

MAX_ATTEMPTS = 200
Concentration = Annotated[
    float, Field(gt=0.0, le=1e12, description="concentration of the labels: small is skewed, large is even")
]


class DirichletClient(ByClass):
    """Each client draws a label prior from Dirichlet(alpha); all hold equally many examples (Dis-PFL, ICML 2022).

    Examples are assigned without replacement (`assign_by_prior`); the test split has the client's label shares
    (`matching_test_split`). Dis-PFL uses alpha 0.3 for CIFAR-10 and 0.2 for CIFAR-100 and Tiny-ImageNet.
    """

    name = "dirichlet-client"
    alpha: Concentration = 0.3
    test_samples: int = Field(default=100, ge=1, description="test examples of each client")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if there are more clients than train examples."""
        priors = self._priors(num_clients, dataset.num_classes, generator)
        labels = dataset.train.labels
        train = assign_by_prior(labels, priors, even_sizes(len(labels), num_clients), generator)
        test = matching_test_split(dataset, train, self.test_samples, generator)
        return self.finish(train, test, f"there are {len(labels)} train examples, so lower clients.count")

    def _priors(self, num_clients: int, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        """The label prior of each client, [num_clients, num_classes]."""
        return _priors(self.alpha, num_clients, num_classes, generator)


class SharedGroups(DirichletClient):
    """As dirichlet-client, but the clients of a group share one prior (`my_part` in the code of Dis-PFL).

    Groups are consecutive clients, and their sizes differ by at most one: with 20 clients and 4 groups, clients 0 to 4
    share a prior.
    """

    name = "shared-groups"
    num_groups: int = Field(default=4, ge=1, description="groups of clients that share a prior")

    def _priors(self, num_clients: int, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        if self.num_groups > num_clients:
            raise RayflError(
                f"partition {self.name!r} has num_groups={self.num_groups} for clients.count={num_clients}: "
                f"give at most as many groups as clients"
            )
        of_groups = _priors(self.alpha, self.num_groups, num_classes, generator)
        return of_groups[np.arange(num_clients) * self.num_groups // num_clients]


class DirichletSizes(ByClass):
    """Label priors from Dirichlet(alpha) and log-normal sizes (Chen et al., Elastic Aggregation, CVPR 2023).

    Client i is to get n_i ~ LogNormal(log(n / num_clients), sigma) examples, scaled to n in total; sigma=0 is balanced,
    0.3 is what Elastic calls unbalanced. The test examples are assigned with the same priors and proportions, so the
    clients' test splits are disjoint and use every test example.
    """

    name = "dirichlet-sizes"
    alpha: Concentration = 100.0
    sigma: float = Field(default=0.0, ge=0.0, le=10.0, description="spread of the sizes, log-normal; 0: all equal")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if a client is so small that it gets nothing."""
        priors = _priors(self.alpha, num_clients, dataset.num_classes, generator)
        # The location log(n / num_clients) cancels in the scaling.
        weights = generator.lognormal(0.0, self.sigma, num_clients)
        labels, test_labels = dataset.train.labels, dataset.test.labels
        train = assign_by_prior(labels, priors, proportional_sizes(len(labels), weights), generator)
        test = assign_by_prior(test_labels, priors, proportional_sizes(len(test_labels), weights), generator)
        return self.finish(train, test, f"there are {len(labels)} train examples, so lower clients.count or sigma")


class DirichletClass(ByClass):
    """Each class is divided by proportions from Dirichlet(alpha) over the clients (Yurochkin et al., ICML 2019).

    Class after class, clients that already hold num_samples / num_clients examples get no more. The draw is repeated
    until every client has `min_samples`. The test examples of a class are shared out in the proportions of its train
    examples.
    """

    name = "dirichlet-class"
    alpha: Concentration = 0.5
    min_samples: int = Field(default=10, ge=1, description="least train examples of a client")

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if no draw gives every client enough examples."""
        labels, test_labels = dataset.train.labels, dataset.test.labels
        per_class = np.bincount(labels, minlength=dataset.num_classes)
        if self.min_samples * num_clients <= len(labels):
            for _ in range(MAX_ATTEMPTS):
                edges = self._edges(per_class, num_clients, generator)
                if _share_sizes(edges, per_class).sum(axis=0).min() >= self.min_samples:
                    train = _share_out(labels, edges, num_clients, generator)
                    test = _share_out(test_labels, edges, num_clients, generator)
                    return self.finish(train, test, "lower clients.count")
        raise RayflError(
            f"partition {self.name!r} with alpha={self.alpha} gave some of {num_clients} clients fewer than "
            f"min_samples={self.min_samples} of the {len(labels)} train examples in every draw: raise alpha, or lower "
            f"clients.count or min_samples"
        )

    def _edges(self, per_class: np.ndarray, num_clients: int, generator: np.random.Generator) -> np.ndarray:
        """Cumulated proportions of each class over the clients, [num_classes, num_clients + 1] from 0 to 1."""
        edges = np.zeros((len(per_class), num_clients + 1))
        sizes = np.zeros(num_clients, np.int64)
        for label in range(len(per_class)):
            is_open = sizes * num_clients < per_class.sum()
            is_open |= ~is_open.any()
            # A Dirichlet draw with some entries left out and the rest scaled to 1 is a Dirichlet draw of the rest. Once
            # all clients are full, only classes without train examples are left: open to all, for the test split.
            shares = np.zeros(num_clients)
            shares[is_open] = generator.dirichlet(np.full(np.count_nonzero(is_open), self.alpha))
            edges[label, 1:] = np.cumsum(shares)
            edges[label] /= edges[label, -1]
            sizes += _share_sizes(edges[label], per_class[label])
        return edges


def _priors(alpha: float, rows: int, num_classes: int, generator: np.random.Generator) -> np.ndarray:
    """Label priors [rows, num_classes], all above zero."""
    return np.maximum(generator.dirichlet(np.full(num_classes, alpha), rows), LEAST_SHARE)


def _share_sizes(edges: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """The numbers of the `total` examples that lie between neighbouring edges."""
    return np.diff((edges * np.expand_dims(total, -1) + 1e-9).astype(np.int64), axis=-1)


def _share_out(labels: np.ndarray, edges: np.ndarray, num_clients: int, generator: np.random.Generator) -> Shards:
    """The examples of each class, shuffled and cut at the edges of that class."""
    owners = np.empty(len(labels), np.int64)
    for label in range(len(edges)):
        examples = generator.permutation(np.flatnonzero(labels == label))
        owners[examples] = np.repeat(np.arange(num_clients), _share_sizes(edges[label], len(examples)))
    return Shards.per_owner(np.arange(len(labels)), owners, num_clients)
