"""Rand-k and the Bernoulli compressor against their definitions."""

import itertools
import math
from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch

from rayfl.compress.random import Bernoulli, RandK, UniformDraw, draw
from rayfl.compress.sparse import Scope, TopK, kept_entries, kept_share
from rayfl.tree import Tree
from tests.refusals import refused

POSITIONS: tuple[Literal["seed", "coded"], ...] = ("seed", "coded")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counting(*sizes: int) -> Tree:
    """1, 2, 3, ... so that each entry tells where it stands."""
    return {f"t{i}": torch.arange(1.0, size + 1) for i, size in enumerate(sizes)}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("scale", "factor"), [(True, 4.0), (False, 1.0)])
def test_k_of_n_entries_arrive_times_n_over_k(positions: Literal["seed", "coded"], scale: bool, factor: float):
    x = counting(40)
    packet, memory = RandK(keep_ratio=0.25, scale=scale, positions=positions).encode(x, {}, rng())
    decoded, support = packet.decode()["t0"], packet.support()["t0"]
    assert int(support.sum()) == 10 and memory == {}
    assert decoded[support].tolist() == (factor * x["t0"][support]).tolist()
    assert decoded[~support].tolist() == [0.0] * 30


def test_a_seed_costs_8_bytes_a_packet():
    packet, _ = RandK(keep_ratio=0.1).encode(counting(1000, 10, 1, 0), {}, rng())
    assert packet.num_bits == 32 * (100 + 1 + 1) + 64
    assert (packet.parts["seed"].dtype, packet.parts["seed"].size) == (np.uint64, 1)
    assert not any(name.endswith(".positions") for name in packet.parts)


def test_nothing_to_choose_from_costs_nothing():
    packet, _ = RandK().encode({"none": torch.zeros(0, 3)}, {}, rng())
    assert packet.num_bits == 0 and packet.decode()["none"].shape == (0, 3)


def test_sent_positions_are_those_that_the_seed_gives():
    x = counting(500, 33)
    seeded, coded = (RandK(positions=positions).encode(x, {}, rng(4))[0] for positions in POSITIONS)
    assert all(torch.equal(seeded.decode()[name], coded.decode()[name]) for name in x)
    # 50 and 4 positions of at least a byte each, and a byte a tensor for the code.
    assert 32 * 54 + 8 * (54 + 2) <= coded.num_bits <= 32 * 54 + 8 * (63 + 5 + 2)


def test_16_bit_values():
    packet, _ = RandK(keep_ratio=0.1, values="bf16").encode(counting(1000), {}, rng())
    assert packet.num_bits == 16 * 100 + 64


def test_every_packet_draws_anew():
    x, generator = counting(1000), rng()
    first, second = (RandK().encode(x, {}, generator)[0] for _ in range(2))
    assert not torch.equal(first.support()["t0"], second.support()["t0"])


@pytest.mark.parametrize(("size", "k"), [(5, 2), (5, 3), (4, 1), (4, 4), (3, 0)])
def test_every_set_of_positions_is_equally_likely(size: int, k: int):
    generator, rounds = rng(1), 6000
    found = Counter(tuple(draw(size, k, generator).tolist()) for _ in range(rounds))
    sets = list(itertools.combinations(range(size), k))
    assert set(found) <= set(sets)
    p = 1 / len(sets)
    # A count has standard deviation sqrt(rounds p (1 - p)); five of them.
    assert all(abs(found[one] - rounds * p) <= 5 * math.sqrt(rounds * p * (1 - p)) for one in sets)


@pytest.mark.parametrize("k", [1, 999, 50_000, 50_001, 99_999, 100_000])
def test_large_draws_have_k_increasing_positions(k: int):
    positions = draw(100_000, k, rng())
    assert positions.size == k and positions.dtype == np.int64
    assert (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < 100_000


def test_model_scope_draws_from_all_entries_and_scales_by_all():
    x = counting(6, 0, 3, 1)
    compressor = RandK(keep_ratio=0.35, scope="model")  # 3.5 of 10: k = 4
    shares = Counter()
    generator = rng(2)
    for _ in range(2000):
        packet, _ = compressor.encode(x, {}, generator)
        support = packet.support()
        assert sum(int(mask.sum()) for mask in support.values()) == 4
        for name, tensor in packet.decode().items():
            assert tensor[support[name]].tolist() == (2.5 * x[name][support[name]]).tolist()
            shares[name] += int(support[name].sum())
    # 0.4 of each tensor. An entry is kept or not with variance 0.24, m of them, correlated negatively, at most 0.24 m.
    for name, size in (("t0", 6), ("t2", 3), ("t3", 1)):
        assert abs(shares[name] - 2000 * 0.4 * size) <= 5 * math.sqrt(2000 * 0.24 * size)


def test_tensor_scope_scales_by_each():
    # ceil(0.3 * 10) = 3 and ceil(0.3 * 4) = 2.
    decoded = RandK(keep_ratio=0.3).encode({"a": torch.ones(10), "b": torch.ones(4)}, {}, rng())[0].decode()
    assert sorted(decoded["a"].tolist()) == [0.0] * 7 + [np.float32(10 / 3)] * 3
    assert sorted(decoded["b"].tolist()) == [0.0] * 2 + [2.0] * 2


def test_the_error_is_exactly_omega_where_all_entries_are_equal():
    # Of 8 ones 6 are lost (6) and two become 4 (2 * 9): 24 = (8 / 2 - 1) * 8.
    x = {"w": torch.ones(8)}
    lost = x["w"] - RandK(keep_ratio=0.25).encode(x, {}, rng())[0].decode()["w"]
    assert float(lost @ lost) == 24.0 == RandK(keep_ratio=0.25).omega(8) * 8  # pyright: ignore[reportOptionalOperand]


@pytest.mark.parametrize(
    ("num_entries", "keep_ratio", "scope", "omega"),
    [
        (10, 0.1, "tensor", 9.0),
        (11_000_000, 0.1, "tensor", 9.0),
        (5, 0.1, "tensor", 4.0),  # one of five at most
        (11, 0.1, "tensor", 9.0),  # a tensor of 10 and one of 1
        (11, 0.1, "model", 4.5),
        (100, 1.0, "tensor", 0.0),
        (1, 0.5, "tensor", 0.0),
        (0, 0.5, "model", 0.0),
    ],
)
def test_omega(num_entries: int, keep_ratio: float, scope: Scope, omega: float):
    compressor = RandK(keep_ratio=keep_ratio, scope=scope)
    assert compressor.omega(num_entries) == pytest.approx(omega, rel=1e-12)
    assert compressor.delta(num_entries) is None


@pytest.mark.parametrize("keep_ratio", [0.1, 1 - 0.7, 0.25, 1 / 3, 0.037, 0.9, 0.5000000001, 0.123456789, 1.0, 1e-5])
def test_no_tensor_keeps_less_than_the_smallest_share(keep_ratio: float):
    for n in (1, 2, 7, 27, 1000, 3000):
        smallest = min(kept_entries(m, keep_ratio) / m for m in range(1, n + 1))
        share = kept_share(n, keep_ratio, "tensor")
        assert share <= smallest * (1 + 1e-15)
        if keep_ratio in (0.1, 1 - 0.7, 0.25, 0.9, 1.0) and n >= 10:
            assert share == pytest.approx(smallest, rel=1e-15)  # attained


def test_constants_of_the_unscaled_one_hold_on_average_only():
    compressor = RandK(keep_ratio=0.25, scale=False)
    assert (compressor.omega(40), compressor.delta(40), compressor.expected_delta(40)) == (None, None, 0.25)
    # The average over all four draws of one of four: of the squares 1, 4, 9 and 16 three quarters are lost.
    x = counting(4)
    lost = {}
    for seed in range(60):
        decoded = compressor.encode(x, {}, rng(seed))[0].decode()["t0"]
        lost[int(decoded.argmax())] = float(((x["t0"] - decoded) ** 2).sum())
    assert lost == {0: 29.0, 1: 26.0, 2: 21.0, 3: 14.0} and sum(lost.values()) / 4 == 0.75 * 30


def test_16_bit_values_are_biased():
    for values in ("fp16", "bf16"):
        assert RandK(values=values).omega(100) is None
    assert RandK(values="fp16", scale=False).expected_delta(100) is None
    assert RandK(values="bf16", scale=False).expected_delta(100) == 0.1 * (1 - 2.0**-16)


def test_a_little_omega_is_a_contraction_on_average():
    # omega = 1/0.8 - 1 = 1/4.
    assert RandK(keep_ratio=0.8).expected_delta(10) == pytest.approx(0.75, rel=1e-12)
    assert RandK(keep_ratio=0.1).expected_delta(10) is None


def test_what_scaling_pushes_beyond_float32_is_refused():
    x = {"w": torch.full((10,), 2e38)}
    with refused(names=["'w'", "2e+38", "float32", "clip"]):
        RandK(keep_ratio=0.1).encode(x, {}, rng())
    assert RandK(keep_ratio=0.1, scale=False).encode(x, {}, rng())[0].decode()["w"].max() == np.float32(2e38)


@pytest.mark.parametrize("compressor", [RandK, TopK])
def test_ratio_out_of_range(compressor: type[RandK] | type[TopK]):
    with refused(names=["keep_ratio=0.0", "(0, 1]"]):
        compressor(keep_ratio=0.0)


def test_the_draw_depends_on_the_seed_and_the_sizes_only():
    rule = UniformDraw(0.5, "tensor")
    first, second = (rule(2**64 - 1, {"a": 100, "b": 7}) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["a"], rule(0, {"a": 100, "b": 7})["a"])


def test_bernoulli_sends_all_or_a_flag():
    x = {"w": torch.tensor([[1.0, -2.0], [3.0, 0.0]]), "b": torch.ones(1)}
    compressor, generator, sent = Bernoulli(probability=0.25), rng(), 0
    for _ in range(2000):
        packet, _ = compressor.encode(x, {}, generator)
        arrived = packet.parts["sent"].tolist() == [1]
        sent += arrived
        assert packet.num_bits == 8 + 32 * 5 * arrived
        assert packet.decode()["w"].tolist() == ([[4.0, -8.0], [12.0, 0.0]] if arrived else [[0.0, 0.0], [0.0, 0.0]])
        assert all(bool(mask.all()) == bool(mask.any()) == arrived for mask in packet.support().values())
    assert abs(sent - 500) <= 5 * math.sqrt(2000 * 0.25 * 0.75)


def test_omega_of_bernoulli():
    # E||C - v||^2 = p (1/p - 1)^2 + (1 - p) = 1/p - 1 for ||v|| = 1.
    assert Bernoulli(probability=0.25).omega(7) == 3.0 == 0.25 * 9 + 0.75
    assert Bernoulli(probability=1.0).omega(7) == 0.0


def test_probability_out_of_range():
    with refused(names=["probability=0.0", "(0, 1]"]):
        Bernoulli(probability=0.0)
