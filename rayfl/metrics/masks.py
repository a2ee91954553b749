"""Compares the clients' masks and their labels, pair by pair (Dai et al., DisPFL, ICML 2022, Figure 5).

The Hamming distance of two masks is the share of entries that one keeps and the other does not, over all entries that
are masked. The similarity of two clients' labels is the cosine between the distributions of their training labels.
"""

from collections.abc import Sequence

import numpy as np

from rayfl import tree

HAMMING, SIMILARITY, CORRELATION = "mask/hamming", "labels/similarity", "mask/hamming_label_correlation"


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


def compared(
    masks: Sequence[tree.PackedBits], counts: np.ndarray | None
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The distances and similarities of all pairs by name, [n, n - 1] each, and their Pearson correlation over pairs.

    counts: the clients' examples of each class, [n, classes]; None if labels are not classes, and then there is no
    similarity. There is no correlation if distances or similarities have only one value.
    """
    pairs = {HAMMING: of_others(hamming(masks))}
    if counts is None:
        return pairs, {}
    pairs[SIMILARITY] = of_others(label_similarity(counts))
    if any(values.size == 0 or np.ptp(values) < 1e-12 for values in pairs.values()):
        return pairs, {}
    return pairs, {CORRELATION: float(np.corrcoef(pairs[HAMMING].ravel(), pairs[SIMILARITY].ravel())[0, 1])}
