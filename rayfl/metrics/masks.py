"""Compares the clients' masks and their labels, pair by pair (Dai et al., DisPFL, ICML 2022, Figure 5).

The Hamming distance of two masks is the share of entries that one keeps and the other does not, over all entries that
are masked. The similarity of two clients' labels is the cosine between the distributions of their training labels.
`mask/filters` is the share of the first convolution's output filters of which a client keeps an entry (Tian et al.,
MCE-PL, Figures 8 and 9); networks without convolutions have none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayfl import tree

HAMMING, SIMILARITY, CORRELATION = "mask/hamming", "labels/similarity", "mask/hamming_label_correlation"
FILTERS = "mask/filters"


class ClientMask(NamedTuple):
    """A client's mask as it is compared: all entries as one vector, and `mask/filters`."""

    entries: tree.PackedBits
    filters: float | None


def client_mask(mask: tree.Tree) -> ClientMask:
    """What is compared of `mask`, bool tensors by name."""
    first_convolution = next((layer for layer in mask.values() if layer.dim() > 2), None)
    if first_convolution is None:
        return ClientMask(mask_bits(mask), None)
    return ClientMask(mask_bits(mask), float(first_convolution.flatten(1).any(dim=1).double().mean()))


def mask_bits(mask: tree.Tree) -> tree.PackedBits:
    """All entries of a mask as one vector in bits."""
    entries = tree.vector(mask)
    return tree.PackedBits(tree.pack_bits(entries), tuple(entries.shape))


def hamming(masks: Sequence[tree.PackedBits]) -> np.ndarray:
    """The Hamming distance of each pair, float64 [n, n] in [0, 1]."""
    distances = np.zeros((len(masks), len(masks)))
    for first, mask in enumerate(masks):
        for second, other in enumerate(masks[:first]):
            differ = int(np.bitwise_count(mask.bits ^ other.bits).sum())
            distances[first, second] = distances[second, first] = differ / mask.shape[0]
    return distances


def label_similarity(counts: np.ndarray) -> np.ndarray:
    """The cosine between each two rows of counts [n, classes], float64 [n, n]; 0 for a client without examples."""
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    shares = counts / np.where(lengths > 0, lengths, 1)
    return shares @ shares.T


def of_others(matrix: np.ndarray) -> np.ndarray:
    """[n, n - 1]: each row without its entry on the diagonal."""
    return matrix[~np.eye(len(matrix), dtype=bool)].reshape(len(matrix), -1)


def compared(masks: Sequence[ClientMask], counts: np.ndarray | None) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The distances and similarities of all pairs by name, [n, n - 1] each, and their Pearson correlation over pairs.

    The shares of filters, [n, 1], are beside the pairs. counts: the clients' examples of each class, [n, classes]; None
    if labels are not classes, and then there is no similarity. There is no correlation if distances or similarities
    have only one value.
    """
    pairs = {HAMMING: of_others(hamming([mask.entries for mask in masks]))}
    filters = [[mask.filters] for mask in masks if mask.filters is not None]
    if filters:
        pairs[FILTERS] = np.array(filters)
    if counts is None:
        return pairs, {}
    pairs[SIMILARITY] = of_others(label_similarity(counts))
    distances, similarities = pairs[HAMMING].ravel(), pairs[SIMILARITY].ravel()
    if not distances.size or np.ptp(distances) < 1e-12 or np.ptp(similarities) < 1e-12:
        return pairs, {}
    return pairs, {CORRELATION: float(np.corrcoef(distances, similarities)[0, 1])}
