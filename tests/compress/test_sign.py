"""Scaled signs and 1-bit SGD on vectors worked out by hand."""

import math

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sign import OneBit, ScaledSign

RNG = np.random.default_rng(0)
LARGEST = float(np.finfo(np.float32).max)


def encode(compressor: Compressor, v: torch.Tensor) -> Packet:
    return compressor.encode({"w": v}, {}, RNG)[0]


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


def lost(packet: Packet, v: torch.Tensor) -> float:
    return float(((packet.decode()["w"].double() - v.double()) ** 2).sum())


def test_signs_carry_the_mean_magnitude_and_zero_is_positive():
    # (1 + 3 + 0 + 0 + 4) / 5 = 1.6
    packet = encode(ScaledSign(), torch.tensor([1.0, -3.0, 0.0, -0.0, 4.0]))
    scale = float(np.float32(1.6))
    assert packet.decode()["w"].tolist() == [scale, -scale, scale, scale, scale]


@pytest.mark.parametrize("size", [1, 8, 9, 1000])
def test_a_sign_is_one_bit(size: int):
    assert encode(ScaledSign(), normal(size)).num_bits == 32 + 8 * math.ceil(size / 8)


def test_every_tensor_has_its_scale():
    x = {"a": torch.tensor([2.0, -2.0]), "zero": torch.zeros(3), "none": torch.zeros(0), "b": torch.tensor(-5.0)}
    decoded = ScaledSign().encode(x, {}, RNG)[0].decode()
    assert all(torch.equal(decoded[name], tensor) for name, tensor in x.items())


def test_the_error_of_signs_is_known():
    # ||C(v) - v||^2 = ||v||^2 - ||v||_1^2 / d
    v = normal(30, 20)
    squared, absolute = float((v.double() ** 2).sum()), float(v.double().abs().sum())
    assert lost(encode(ScaledSign(), v), v) == pytest.approx(squared - absolute**2 / 600, rel=1e-9)


@pytest.mark.parametrize("compressor", [ScaledSign(), OneBit()])
def test_one_entry_among_zeros_attains_delta(compressor: Compressor):
    v = torch.zeros(16)
    v[5] = 8.0
    delta = compressor.delta(16)
    assert delta == pytest.approx(1 / 16, rel=1e-9)
    assert lost(encode(compressor, v), v) == pytest.approx((1 - 1 / 16) * 64)


@pytest.mark.parametrize("compressor", [ScaledSign(), OneBit()])
def test_the_largest_numbers_do_not_overflow(compressor: Compressor):
    v = torch.tensor([LARGEST, -LARGEST, LARGEST])
    assert torch.equal(encode(compressor, v).decode()["w"], v)


def test_onebit_has_two_means_a_row():
    v = torch.tensor([[1.0, 3.0, -2.0], [-1.0, -5.0, 0.0], [4.0, 4.0, 1.0]])
    assert encode(OneBit(), v).decode()["w"].tolist() == [[2.0, 2.0, -2.0], [-3.0, -3.0, 0.0], [3.0, 3.0, 3.0]]


def test_groups_are_what_feeds_one_output_unit():
    assert encode(OneBit(), normal(6, 3, 2, 2)).num_bits == 72 + 64 * 6
    assert encode(OneBit(), normal(6)).num_bits == 8 + 64
    assert encode(OneBit(), torch.tensor(-0.5)).num_bits == 8 + 64
    assert encode(OneBit(), torch.zeros(4, 0)).num_bits == encode(OneBit(), torch.zeros(0, 4)).num_bits == 0


def test_filters_are_rows_of_a_matrix():
    v = normal(6, 3, 2, 2)
    flat = encode(OneBit(), v.view(6, 12)).decode()["w"]
    assert torch.equal(encode(OneBit(), v).decode()["w"], flat.view(6, 3, 2, 2))


def test_the_error_of_onebit_is_known():
    # ||C(v) - v||^2 = ||v||^2 - sum over groups and signs of n mu^2
    v = normal(5, 40)
    kept = sum(len(part) * float(part.mean()) ** 2 for row in v.double() for part in (row[row >= 0], row[row < 0]))
    assert lost(encode(OneBit(), v), v) == pytest.approx(float((v.double() ** 2).sum()) - kept, rel=1e-9)


def test_onebit_keeps_the_sum_of_every_row():
    v = normal(5, 40)
    torch.testing.assert_close(encode(OneBit(), v).decode()["w"].sum(dim=1), v.sum(dim=1))


@pytest.mark.parametrize("compressor", [ScaledSign(), OneBit()])
def test_feedback_delivers_what_was_dropped(compressor: Compressor):
    # Sent so far + memory = all that was to be sent.
    feedback, v = ErrorFeedback(inner=compressor), normal(4, 25)
    memory, sent = feedback.init({"w": v}), torch.zeros(4, 25)
    for _ in range(50):
        packet, memory = feedback.encode({"w": v}, memory, RNG)
        sent += packet.decode()["w"]
    torch.testing.assert_close(sent + memory["w"], 50 * v, rtol=1e-4, atol=1e-4)
