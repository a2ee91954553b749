"""Hard thresholding against its definition."""

import numpy as np
import pytest
import torch

from rayfl.compress.threshold import Threshold
from tests.refusals import refused

RNG = np.random.default_rng(0)


def sent(compressor: Threshold, *numbers: float) -> list[float]:
    return compressor.encode({"w": torch.tensor(numbers)}, {}, RNG)[0].decode()["w"].tolist()


def test_magnitudes_that_reach_the_threshold_are_kept():
    assert sent(Threshold(threshold=2.0), 1.0, -2.0, 3.0, -1.999, 0.0) == [0.0, -2.0, 3.0, 0.0, 0.0]


def test_the_threshold_is_a_float32_as_the_entries_are():
    # float32(0.7) is below 0.7, and an entry that was written as 0.7 reaches 0.7.
    assert float(np.float32(0.7)) < 0.7
    assert sent(Threshold(threshold=0.7), 0.7, -0.7, 0.69) == [np.float32(0.7), -np.float32(0.7), 0.0]


def test_relative_to_the_largest_magnitude_of_each_tensor():
    x = {"a": torch.tensor([1.0, -8.0, 4.0, 3.9]), "b": torch.tensor([0.1, 0.06, 0.04]), "none": torch.zeros(0)}
    support = Threshold(threshold=0.5, relative=True).encode(x, {}, RNG)[0].support()
    assert [mask.tolist() for mask in support.values()] == [[False, True, True, False], [True, True, False], []]


def test_relative_to_1_keeps_the_largest_only():
    assert sent(Threshold(threshold=1.0, relative=True), 0.3, -0.9, 0.9, 0.8999) == [
        0.0, -np.float32(0.9), np.float32(0.9), 0.0,
    ]  # fmt: skip


def test_nothing_may_be_sent():
    packet, _ = Threshold(threshold=5.0).encode({"w": torch.ones(100), "b": torch.zeros(3)}, {}, RNG)
    assert packet.num_bits == 0
    assert not packet.decode()["w"].any() and not packet.support()["w"].any()


def test_zeros_are_never_sent():
    x = {"zero": torch.zeros(9), "tiny": torch.tensor([1e-45, 0.0, -1e-45])}
    # A tenth of the smallest number is 0 in float32.
    support = Threshold(threshold=0.1, relative=True).encode(x, {}, RNG)[0].support()
    assert not support["zero"].any() and support["tiny"].tolist() == [True, False, True]


def test_bits_are_values_and_positions():
    x = torch.zeros(1000)
    x[::10] = 1.0
    # As top-k: a byte a position, and one that names the code; everything and nothing need no positions.
    for compressor, value_bits in ((Threshold(threshold=0.5), 32), (Threshold(threshold=0.5, values="bf16"), 16)):
        packet, _ = compressor.encode({"w": x, "all": torch.ones(3)}, {}, RNG)
        assert packet.num_bits == 103 * value_bits + 8 * (100 + 1)


def test_delta_is_attained_by_one_entry_above_and_the_others_just_below():
    t, n = 0.25, 17
    compressor = Threshold(threshold=t, relative=True)
    x = torch.full((n,), float(np.nextafter(np.float32(t), np.float32(0))))
    x[5] = 1.0
    lost = x - compressor.encode({"w": x}, {}, RNG)[0].decode()["w"]
    share = float((lost.double() ** 2).sum() / (x.double() ** 2).sum())
    delta = compressor.delta(n)
    assert delta is not None and delta == 1 / (1 + 16 / 16) == 0.5
    assert share <= 1 - delta and share == pytest.approx(1 - delta, rel=1e-6)


def test_an_absolute_threshold_has_no_constant():
    compressor = Threshold(threshold=0.1)
    assert (compressor.delta(10), compressor.omega(10), compressor.expected_delta(10)) == (None, None, None)
    x = {"w": torch.from_numpy(RNG.uniform(-0.3, 0.3, 1000).astype(np.float32))}
    lost = x["w"] - compressor.encode(x, {}, RNG)[0].decode()["w"]
    assert 0 < float((lost**2).sum()) < 1000 * 0.1**2


def test_settings():
    with refused(names=["threshold=1.5", "(0, 1]"]):
        Threshold(threshold=1.5, relative=True)
    with refused(names=["threshold=0.0", "greater than 0"]):
        Threshold(threshold=0.0)
    assert Threshold(threshold=1.5).threshold == 1.5
