"""Random numbers belong to what they are for."""

import itertools
import random

import numpy as np
import pytest
import torch

from rayfl.determinism import seeding
from tests.refusals import refused

KEYS = [
    (0, -1, -1, ""),
    (1, -1, -1, ""),
    (0, 0, -1, ""),
    (0, -1, 0, ""),
    (0, 0, 0, ""),
    (0, -1, -1, "x"),
    (0, 1, 0, ""),
    (0, 0, 1, ""),
]


def test_the_same_key_gives_the_same_numbers():
    for key in KEYS:
        assert np.array_equal(seeding.generator(*key).random(8), seeding.generator(*key).random(8))
        assert seeding.torch_seed(*key) == seeding.torch_seed(*key)


@pytest.mark.parametrize("a, b", list(itertools.combinations(KEYS, 2)))
def test_another_key_gives_other_numbers(a: tuple, b: tuple):
    assert not np.array_equal(seeding.generator(*a).random(8), seeding.generator(*b).random(8))
    assert seeding.torch_seed(*a) != seeding.torch_seed(*b)


def test_the_numbers_are_those_of_numpy_everywhere():
    # crc32("batches") by the polynomial 0xEDB88320, bit by bit; then numpy's own, which are specified.
    crc = 0xFFFFFFFF
    for byte in b"batches":
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    sequence = np.random.SeedSequence([7, 4, 6, crc ^ 0xFFFFFFFF])
    expected = np.random.Generator(np.random.PCG64(sequence)).integers(0, 1000, 5)
    assert (
        seeding.generator(7, round_number=3, client=5, purpose="batches").integers(0, 1000, 5).tolist()
        == expected.tolist()
    )


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**70])
def test_generators_made_together_are_those_made_alone(seed: int):
    rounds, clients = [0, 3, -1, 2**31, 1000], [0, 5, -1, 2**32 - 2, 64]
    together = seeding.generators(seed, rounds, clients, "train/batches")
    for round_number, client, drawn in zip(rounds, clients, together, strict=True):
        alone = seeding.generator(seed, round_number, client, "train/batches")
        assert drawn.bit_generator.state == alone.bit_generator.state


def test_nothing_global_is_drawn_from_or_changed():
    before = str(np.random.get_state()), torch.random.get_rng_state().tolist(), random.getstate()  # noqa: NPY002
    seeding.generator(1, 2, 3, "x").random(100)
    seeding.torch_seed(1)
    seeding.coin(1, 2)
    after = str(np.random.get_state()), torch.random.get_rng_state().tolist(), random.getstate()  # noqa: NPY002
    assert before == after


def test_torch_seeds_fit_torch():
    assert all(0 <= seeding.torch_seed(seed) < 2**63 for seed in range(50))


def test_a_coin_is_fair_and_the_same_for_everyone():
    coins = [seeding.coin(3, round) for round in range(2000)]
    assert coins == [seeding.coin(3, round) for round in range(2000)]
    assert all(0 <= coin < 1 for coin in coins)
    # The mean of 2000 uniform numbers has standard deviation sqrt(1 / 12 / 2000) = 0.0065; five of them.
    assert abs(np.mean(coins) - 0.5) < 0.033


def test_a_negative_seed_is_refused():
    with refused(names=["non-negative"], error=ValueError):
        seeding.generator(-1)
