"""Counts in 64 bits, real numbers in 32."""

import math
import pickle

import pytest
import torch

from rayfl.compress.scalar import count_packet, scalar_packet
from tests.refusals import refused


@pytest.mark.parametrize("count", [0, 1, 60_000, 2**53 - 1, -3])
def test_a_count_is_exact_in_64_bits(count: int):
    packet = pickle.loads(pickle.dumps(count_packet("num_examples", count)))  # noqa: S301 - our own bytes
    assert packet.num_bits == 64
    assert int(packet.decode()["num_examples"]) == count
    assert packet.support()["num_examples"].item() is True


def test_sums_of_counts_are_exact_beyond_float32():
    # 2^24 + 1 is not a float32.
    total = {"n": torch.zeros((), dtype=torch.float64)}
    count_packet("n", 2**24).add_to(total, 1.0)
    count_packet("n", 1).add_to(total, 1.0)
    assert total["n"].item() == 2**24 + 1


def test_a_scalar_is_a_float32():
    packet = scalar_packet("loss", 0.1)
    assert packet.num_bits == 32
    decoded = packet.decode()["loss"]
    assert decoded.shape == () and decoded.item() == torch.tensor(0.1).item()
    total = {"loss": torch.tensor(1.0)}
    scalar_packet("loss", 0.5).add_to(total, -2.0)
    assert total["loss"].item() == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39])
def test_a_scalar_that_is_no_float32_is_refused(value: float):
    with refused(names=["loss", "NaN", "infinity", "float32", "lower"], error=ValueError):
        scalar_packet("loss", value)
