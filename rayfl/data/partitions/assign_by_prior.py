"""Assign labelled examples to clients by each client's label prior, without replacement.

The process follows the code of Dis-PFL: a random client that still needs examples draws a label from its prior, among
the labels with examples left, and takes a random example with this label; this is repeated. Here the process is
vectorised: all requests are drawn at once, and only those that came too late for their label are drawn again.
"""

import numpy as np

from rayfl.data.partition import Shards

LEAST_SHARE = 1e-300
"""Floor of a Dirichlet prior: a client whose likely labels have run out takes any that is left."""


def assign_by_prior(
    labels: np.ndarray, priors: np.ndarray, sizes: np.ndarray, generator: np.random.Generator
) -> Shards:
    """Give each client examples by its label prior.

    labels: int64 [num_samples]; priors: [num_clients, num_classes], in any scale; sizes: the number of examples for
    each client, int64 [num_clients]. A label that has run out is left out of the priors from then on; a client whose
    labels have all run out (prior 0 on the rest) gets fewer examples.
    """
    num_clients, num_classes = priors.shape
    supply = np.bincount(labels, minlength=num_classes)
    clients = _arrivals(sizes, generator)
    label_of_request = _served(clients, priors, supply, generator)
    # One line of examples a label, in random order; a label's requests are served from its line as they arrive.
    line = generator.permutation(len(labels))
    line = line[np.argsort(labels[line], kind="stable")]
    requests = np.argsort(label_of_request, kind="stable")[np.count_nonzero(label_of_request < 0) :]
    granted = label_of_request[requests]
    position = np.arange(len(requests)) - np.searchsorted(granted, granted)
    line_starts = np.cumsum(supply) - supply
    return Shards.per_owner(line[line_starts[granted] + position], clients[requests], num_clients)


def even_sizes(total: int, parts: int) -> np.ndarray:
    """`total` in `parts` sizes that differ by at most one, the larger ones spread out; int64 [parts]."""
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)


def proportional_sizes(total: int, weights: np.ndarray) -> np.ndarray:
    """`total` in whole numbers proportional to `weights`, by the largest remainders; int64, sums to `total`."""
    exact = total * weights / weights.sum()
    sizes = np.floor(exact).astype(np.int64)
    largest = np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]
    sizes[largest] += 1
    return sizes


def _arrivals(sizes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The client of each request, in the order of arrival: each time uniform among those that still want examples.

    Clients that ask at the ticks of independent Poisson clocks of the same rate arrive in just this order.
    """
    clients = np.repeat(np.arange(len(sizes)), sizes)
    ticks = np.cumsum(generator.exponential(size=len(clients)))
    start_of_client = np.concatenate([[0.0], ticks])[np.cumsum(sizes) - sizes]
    return clients[np.argsort(ticks - start_of_client[clients], kind="stable")]


def _served(clients: np.ndarray, priors: np.ndarray, supply: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The label that each request gets, -1 where its labels have all run out; int16 or int64 [num_requests]."""
    num_classes = len(supply)
    is_open = supply > 0
    labels = _draw(priors * is_open, clients, generator)
    while True:
        by_label = np.argsort(labels, kind="stable")
        counts = np.bincount(labels + 1, minlength=num_classes + 1)
        starts = np.cumsum(counts)[:-1]
        short = np.flatnonzero(counts[1:] > supply)
        if not len(short):
            return labels
        # The label that runs out first: later requests for it are drawn again, among the labels still open.
        ends = by_label[starts[short] + supply[short] - 1]
        label = short[np.argmin(ends)]
        is_open[label] = False
        late = by_label[starts[label] + supply[label] : starts[label] + counts[1 + label]]
        labels[late] = _draw(priors * is_open, clients[late], generator)


def _draw(weights: np.ndarray, clients: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """One label for each entry of `clients`, from its row of `weights`; -1 where the row is all zero."""
    who, row = np.unique(clients, return_inverse=True)
    cumulated = np.cumsum(weights[who], axis=1)
    total = cumulated[:, -1:]
    is_dead = total[:, 0] == 0.0
    cumulated = np.where(is_dead[:, None], 1.0, cumulated / np.where(is_dead[:, None], 1.0, total))
    # Row r occupies [r, r + 1], so that one search serves all rows; the cap keeps rounding from reaching row r + 1.
    points = row + np.minimum(generator.random(len(clients)), 1.0 - 1e-9)
    flat = (cumulated + np.arange(len(who))[:, None]).ravel()
    labels = np.searchsorted(flat, points, side="right") - row * weights.shape[1]
    # Small numbers sort fastest.
    return np.where(is_dead[row], -1, labels).astype(np.int16 if weights.shape[1] < 2**15 else np.int64)
