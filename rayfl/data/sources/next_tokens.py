"""The targets of sequences of tokens."""

import numpy as np

PAD = 0


def next_tokens(tokens: np.ndarray) -> np.ndarray:
    """The token that follows each of `tokens` [n, length], int64 of that shape; -1 at the end and before padding, 0."""
    following = np.full(tokens.shape, -1, np.int64)
    following[:, :-1] = np.where(tokens[:, 1:] == PAD, -1, tokens[:, 1:])
    return following
