"""Signs without a scale."""

import pytest
import torch

from rayfl.compress.sign import votes_packet
from tests.refusals import refused

MIXED = {"a": torch.tensor([[1.5, -2.0, 0.0], [-0.0, -1e-40, 3.0]]), "b": torch.tensor(-4.0), "c": torch.zeros(9)}


def test_without_ties_zero_is_positive():
    decoded = votes_packet(MIXED).decode()
    assert decoded["a"].tolist() == [[1, -1, 1], [1, -1, 1]]
    assert decoded["b"].item() == -1 and decoded["b"].shape == ()
    assert decoded["c"].tolist() == [1] * 9


def test_with_ties_zero_is_zero():
    decoded = votes_packet(MIXED, ties=True).decode()
    assert decoded["a"].tolist() == [[1, -1, 0], [0, -1, 1]]
    assert decoded["c"].tolist() == [0] * 9


def test_one_bit_or_two_an_entry_in_whole_bytes():
    # 6, 1 and 9 entries: 1 + 1 + 2 bytes, and 2 + 1 + 3.
    assert votes_packet(MIXED).num_bits == 8 * 4
    assert votes_packet(MIXED, ties=True).num_bits == 8 * 6


@pytest.mark.parametrize("ties", [False, True])
def test_votes_add_up(ties: bool):
    total = {name: torch.ones(tensor.shape) for name, tensor in MIXED.items()}
    packet = votes_packet(MIXED, ties)
    packet.add_to(total, 2.0)
    assert all(torch.equal(total[name], 1 + 2 * tensor) for name, tensor in packet.decode().items())
    assert all(tensor.all() for tensor in packet.support().values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(bad: float):
    with refused(names=["'a'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        votes_packet({"a": torch.tensor([1.0, bad])})
