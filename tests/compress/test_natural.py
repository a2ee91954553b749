"""Natural compression: the two neighbouring powers of two, their probabilities, nine bits."""

import math

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet
from rayfl.compress.natural import NaturalCompression
from tests.compress.even import Even

LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149


def encode(v: torch.Tensor, seed: int = 0) -> Packet:
    return NaturalCompression().encode({"w": v}, {}, np.random.default_rng(seed))[0]


@pytest.mark.parametrize(("entry", "lower", "ups"), [(1.25, 1.0, 16), (-3.0, -2.0, 32), (0.2421875, 0.125, 60)])
def test_frequencies_are_exact_under_even_draws(entry: float, lower: float, ups: int):
    # (|v| - 2^a) / 2^a = 16/64, 32/64 and 60/64; the draws of 23 bits are spread out by the shift of `Even`.
    class Even23(Even):
        def integers(self, *args, **kwargs):
            return (super().integers(*args, **kwargs).view(np.uint32) >> 9).view(np.uint64)

    packet, _ = NaturalCompression().encode({"w": torch.full((64,), entry)}, {}, Even23(64))
    decoded = packet.decode()["w"]
    assert (decoded == 2 * lower).sum() == ups and (decoded == lower).sum() == 64 - ups
    assert decoded.double().mean() == entry


def test_powers_of_two_are_kept():
    v = 2.0 ** torch.arange(-126, 128)
    assert torch.equal(encode(torch.cat([v, -v, torch.zeros(2)])).decode()["w"], torch.cat([v, -v, torch.zeros(2)]))


def test_omega_is_attained_at_four_thirds():
    # (v - 1)(2 - v) / v^2 is 1/8 at v = 4/3, its largest value.
    decoded = encode(torch.full((100_000,), 4 / 3)).decode()["w"].double()
    assert set(decoded.unique().tolist()) == {1.0, 2.0}
    squares = (decoded - 4 / 3) ** 2
    assert abs(float(squares.mean()) - 2 / 9) <= 5 * float(squares.std()) / math.sqrt(100_000)
    assert NaturalCompression().omega(10) == 1 / 8 == pytest.approx((2 / 9) / (4 / 3) ** 2)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_nine_bits_an_entry(size: int):
    assert encode(torch.ones(size)).num_bits == 8 * size + 8 * math.ceil(size / 8)


def test_subnormal_numbers_become_zero_or_the_smallest_normal_one():
    decoded = encode(torch.full((100_000,), -(2.0**-128))).decode()["w"].double() / 2.0**-126
    assert set(decoded.unique().tolist()) == {-1.0, 0.0}
    assert abs(float(decoded.mean()) + 0.25) <= 5 * math.sqrt(0.25 * 0.75 / 100_000)
    assert encode(torch.tensor([SMALLEST])).decode()["w"].item() in (0.0, 2.0**-126)


def test_the_top_of_the_range_rounds_to_the_largest_number():
    top = np.float64(2.0**127)
    v = torch.full((100_000,), 1.25 * 2.0**127)
    v[0], v[1], v[2] = LARGEST, -LARGEST, 2.0**127
    decoded = encode(v).decode()["w"].double()
    assert decoded[:3].tolist() == [LARGEST, -LARGEST, top]
    assert set(decoded[3:].unique().tolist()) == {top, LARGEST}
    assert abs(float(decoded[3:].mean() / top) - 1.25) <= 5 * math.sqrt(0.25 * 0.75 / 99_997)
    # A number just below 2^127 may become 2^127, never more.
    below = encode(torch.full((1000,), 1.5 * 2.0**126)).decode()["w"].double()
    assert set(below.unique().tolist()) == {2.0**126, top}


def test_signs_are_kept():
    v = torch.from_numpy(np.random.default_rng(1).standard_normal(1000).astype(np.float32))
    assert torch.equal(torch.sign(encode(v).decode()["w"]), torch.sign(v))
