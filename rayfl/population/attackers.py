"""The clients of an experiment that attack it."""

import math

from rayfl.determinism import seeding


def attackers(seed: int, num_clients: int, share: float) -> frozenset[int]:
    """A share of the clients, rounded to whole ones, the same in all rounds; a larger share has those of a smaller."""
    order = seeding.generator(seed, purpose="attackers").permutation(num_clients)
    return frozenset(order[: math.floor(share * num_clients + 0.5)].tolist())
