"""Values at positions that both ends know: only they are sent, and only there anything arrives."""

import pickle

import torch

from rayfl.compress.masks import known_support_packet
from tests.refusals import refused

VALUES = {"w": torch.tensor([[1.0, 2.0], [0.0, -4.0]]), "b": torch.tensor([5.0])}
SUPPORT = {"w": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([True])}


def test_only_values_cross_the_wire():
    packet = pickle.loads(pickle.dumps(known_support_packet(VALUES, SUPPORT)))  # noqa: S301 - our own bytes
    # Three of w, the 0 among them, and one of b, 32 bits each.
    assert packet.num_bits == 4 * 32
    assert packet.decode()["w"].tolist() == [[1.0, 0.0], [0.0, -4.0]]
    assert all(torch.equal(packet.support()[name], SUPPORT[name]) for name in SUPPORT)
    assert packet.presence()["w"].tolist() == [[1.0, 0.0], [1.0, 1.0]]
    total = {name: torch.ones_like(tensor) for name, tensor in VALUES.items()}
    packet.add_to(total, 2.0)
    assert total["w"].tolist() == [[3.0, 1.0], [1.0, -7.0]] and total["b"].tolist() == [11.0]


def test_nothing_kept_costs_nothing_and_nan_is_refused():
    nothing = {name: torch.zeros_like(mask) for name, mask in SUPPORT.items()}
    packet = known_support_packet(VALUES, nothing)
    assert packet.num_bits == 0 and not packet.decode()["w"].any()
    with refused(names=["'b'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        known_support_packet({**VALUES, "b": torch.tensor([float("nan")])}, SUPPORT)
