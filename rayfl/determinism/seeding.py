"""Random generators keyed by their purpose, so that no draw depends on the order of draws.

Every random number of an experiment comes from `generator(seed, round, client, purpose)`; there is no global state.
Same key, same numbers, on any machine (numpy's SeedSequence and PCG64 are specified).
"""

import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.random.bit_generator import ISeedSequence

NOBODY = -1
"""The round of draws made once, before round 0, and the client of draws made for the server."""


def _constants(first: int, factor: int, count: int) -> np.ndarray:
    """`first` times the powers of `factor`, uint32 [count, 1]."""
    return np.array([[first * pow(factor, power, 1 << 32) % (1 << 32)] for power in range(count)], np.uint32)


_IN, _OUT = _constants(0x43B0D7E5, 0x931E8875, 17), _constants(0x8B51F9DD, 0x58F38DED, 9)
"""The constants of numpy's SeedSequence, for what goes into its pool and for what comes out."""


def generator(seed: int, round_number: int = NOBODY, client: int = NOBODY, purpose: str = "") -> np.random.Generator:
    """The generator of one purpose. `round_number` and `client` are at least -1 (`NOBODY`); `seed` at least 0."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, round_number, client, purpose)))


def generators(seed: int, rounds: Sequence[int], clients: Sequence[int], purpose: str) -> list[np.random.Generator]:
    """`generator` of each round and client, for many at once: numpy makes a SeedSequence in four times as long."""
    if seed >= 1 << 32:
        return [generator(seed, *key, purpose) for key in zip(rounds, clients, strict=True)]
    words = np.broadcast_arrays(seed, np.add(rounds, 1), np.add(clients, 1), zlib.crc32(purpose.encode()))
    pool = _hashed(np.array(words, np.uint32), _IN[:5])
    for word in range(4):
        others = [other for other in range(4) if other != word]
        mixed = 0xCA01F9DD * pool[others] - 0x4973F715 * _hashed(pool[word], _IN[4 + 3 * word : 8 + 3 * word])
        pool[others] = mixed ^ mixed >> 16
    states = np.ascontiguousarray(_hashed(np.concatenate([pool, pool]), _OUT).T).view(np.uint64)
    # The stubs of PCG64 know no ISeedSequence.
    return [np.random.Generator(np.random.PCG64(_State(state))) for state in states]  # pyright: ignore[reportArgumentType]


def _hashed(words: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """SeedSequence's hash of uint32 [k, n] or [n], with k + 1 constants."""
    hashed = (words ^ constants[:-1]) * constants[1:]
    return hashed ^ hashed >> 16


class _State(ISeedSequence):
    """What a SeedSequence gives PCG64, uint64 [4]."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray:
        return self.words


class LazyGenerator:
    """The generator of one purpose, made when it is first asked for: most calls draw nothing."""

    def __init__(self, seed: int, round_number: int = NOBODY, client: int = NOBODY, purpose: str = "") -> None:
        self.key = (seed, round_number, client, purpose)

    @cached_property
    def generator(self) -> np.random.Generator:
        """The one generator of this key; each draw continues where the last one ended."""
        return generator(*self.key)


class FirstDraws:
    """The generators from which a client's state before its first round is drawn."""

    def __init__(self, seed: int, client: int) -> None:
        self.seed = seed
        self.client = client

    @cached_property
    def own(self) -> np.random.Generator:
        """The generator of this (seed, client), for draws that differ between clients."""
        return generator(self.seed, client=self.client, purpose="first state")

    def common(self, purpose: str) -> np.random.Generator:
        """A fresh generator of one purpose, with the same numbers for all clients of a run."""
        return generator(self.seed, purpose=purpose)


def torch_seed(seed: int, round_number: int = NOBODY, client: int = NOBODY, purpose: str = "") -> int:
    """A 63-bit seed for a `torch.Generator` or a forked torch state, keyed in the same way."""
    return int(_sequence(seed, round_number, client, purpose).generate_state(1, np.uint64)[0] >> 1)


def coin(seed: int, round_number: int) -> float:
    """The coin of a round in [0, 1), shared by the server and all clients (L2GD, FedPD, MARINA)."""
    return float(generator(seed, round_number, purpose="coin").random())


def _sequence(seed: int, round_number: int, client: int, purpose: str) -> np.random.SeedSequence:
    key = [seed, round_number + 1, client + 1, zlib.crc32(purpose.encode())]
    # The same words; numpy takes three times as long to make them of a list.
    return np.random.SeedSequence(np.array(key, np.uint32) if min(key) >= 0 and max(key) < 2**32 else key)
