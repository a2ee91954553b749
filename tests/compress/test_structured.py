"""Filters and channels against loops over them, thresholds for a ratio against a search of all, bytes by hand."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet
from rayfl.compress.structured import Structured, threshold_for
from tests.refusals import refused

RNG = np.random.default_rng(0)
SHAPES = [(5, 4, 3, 3), (7, 3), (6, 9, 2), (1, 8), (8, 1, 2, 2)]


def encode(v: torch.Tensor, **settings: Any) -> Packet:
    return Structured(**settings).encode({"w": v}, {}, RNG)[0]


def uneven(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Filters and channels of unequal size, so that thresholds cut some of them."""
    draw = np.random.default_rng(seed)
    v = draw.standard_normal(shape)
    v *= draw.uniform(0, 1, (shape[0], *[1] * (len(shape) - 1)))
    v *= draw.uniform(0, 1, (1, shape[1], *[1] * (len(shape) - 2)))
    return v.astype(np.float32)


def normalized(v: np.ndarray, threshold: float) -> np.ndarray:
    """Filters below the threshold are zeroed, then channels of what is left."""
    v = v.astype(np.float64).copy()
    for axis in (0, 1):
        scores = np.array([np.abs(np.take(v, i, axis)).sum() for i in range(v.shape[axis])])
        for i in np.flatnonzero(scores / scores.max() < threshold):
            v[(slice(None),) * axis + (i,)] = 0
    return v


def raw(v: np.ndarray, threshold: float) -> np.ndarray:
    """Sums of magnitudes of the whole tensor, for filters and channels."""
    cut = v.astype(np.float64).copy()
    for o, c in itertools.product(range(v.shape[0]), range(v.shape[1])):
        if np.abs(v[o]).sum() < threshold or np.abs(v[:, c]).sum() < threshold:
            cut[o, c] = 0
    return cut


def expected_bits(cut: np.ndarray) -> int:
    """Continuous entries: a block is kept if it has any nonzero."""
    filters, channels = (int(np.any(np.moveaxis(cut, axis, 0) != 0, axis=tuple(range(1, cut.ndim))).sum())
                         for axis in (0, 1))  # fmt: skip
    num_values = filters * channels * math.prod(cut.shape[2:])
    return 32 * num_values + 8 * (math.ceil(cut.shape[0] / 8) + math.ceil(cut.shape[1] / 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_normalized_scores(shape: tuple[int, ...], threshold: float):
    v = uneven(shape)
    packet, expected = encode(torch.from_numpy(v), threshold=threshold), normalized(v, threshold)
    np.testing.assert_array_equal(packet.decode()["w"].numpy(), expected)
    np.testing.assert_array_equal(packet.support()["w"].numpy(), expected != 0)
    assert packet.num_bits == expected_bits(expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.5, 4.0, 1e6])
def test_raw_scores(shape: tuple[int, ...], threshold: float):
    v = uneven(shape)
    packet, expected = encode(torch.from_numpy(v), threshold=threshold, scores="raw"), raw(v, threshold)
    np.testing.assert_array_equal(packet.decode()["w"].numpy(), expected)
    if expected.any():
        assert packet.num_bits == expected_bits(expected)


def test_by_hand():
    # Rows 8, 4, 1: normalised 1, 0.5, 0.125. At 0.3 the third goes; columns then have 3, 9, 0: 1/3, 1, 0.
    v = torch.tensor([[1.0, -7.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, -1.0]])
    packet = encode(v, threshold=0.3)
    assert packet.decode()["w"].tolist() == [[1.0, -7.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    parts = {name: part.tolist() for name, part in packet.parts.items()}
    assert parts == {"w.values": [1.0, -7.0, 2.0, 2.0], "w.filters": [0b11000000], "w.channels": [0b11000000]}
    # Raw sums: rows 8, 4, 1 and columns 3, 9, 1; at 3.5 the first column goes as well.
    assert encode(v, threshold=3.5, scores="raw").decode()["w"].tolist() == [
        [0.0, -7.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0],
    ]  # fmt: skip


def test_channels_are_scored_before_or_after_the_filters_are_cut():
    # Rows 10, 2; the second row alone fills column 1 (sum 2). After row 1 is cut (0.2 < 0.3) the column is empty.
    # Raw, at 2.5: row 1 goes, and column 1 too; at 2: both stay.
    v = torch.tensor([[10.0, 0.0], [0.0, 2.0]])
    assert encode(v, threshold=0.3).parts["w.channels"].tolist() == [0b10000000]
    assert encode(v, threshold=2.0, scores="raw").decode()["w"].tolist() == v.tolist()
    # Columns 9, 5 of which row 0 has 9, 1: normalised after the cut 1/9, before it would be 5/9.
    v = torch.tensor([[9.0, 1.0], [0.0, 4.0]])
    assert encode(v, threshold=0.5).parts["w.channels"].tolist() == [0b10000000]


def test_a_score_at_the_threshold_is_kept():
    v = torch.tensor([[4.0, 0.0], [0.0, 2.0]])
    assert encode(v, threshold=0.5).decode()["w"].tolist() == v.tolist()
    assert encode(v, threshold=2.0, scores="raw").decode()["w"].tolist() == v.tolist()


@pytest.mark.parametrize("scores", ["normalized", "raw"])
def test_tensors_of_one_dimension_are_whole(scores: Any):
    x = {"bias": torch.tensor([1e-9, 0.0, -1.0]), "scale": torch.tensor(1e-9), "none": torch.zeros(0)}
    packet, _ = Structured(threshold=0.9, scores=scores).encode(x, {}, RNG)
    assert all(torch.equal(packet.decode()[name], tensor) for name, tensor in x.items())
    assert packet.num_bits == 32 * 4


def test_zeros_cost_their_bitmaps():
    packet = encode(torch.zeros(9, 3, 2, 2))
    assert packet.num_bits == 8 * (2 + 1)
    assert not packet.decode()["w"].any()


@pytest.mark.parametrize("shape", [(12, 10), (16, 3, 3, 3), (6, 9, 2), (2, 30)], ids=str)
@pytest.mark.parametrize("keep_ratio", [0.02, 0.1, 0.3, 0.7, 1.0])
def test_a_ratio_is_met_as_nearly_as_a_threshold_can(shape: tuple[int, ...], keep_ratio: float):
    v = uneven(shape, seed=1)
    packet = encode(torch.from_numpy(v), keep_ratio=keep_ratio)
    sent = packet.parts["w.values"].size

    def count(threshold: float) -> int:
        return int((normalized(v, threshold) != 0).sum())

    # What 500 steps between 0 and 1 give.
    reachable = {count(threshold) for threshold in np.linspace(0, 1, 501)}
    nearest = min(abs(other - keep_ratio * v.size) for other in reachable)
    assert abs(sent - keep_ratio * v.size) <= nearest + 1e-9
    # And it is a threshold that cut them: filters, then channels.
    mass = np.abs(v.astype(np.float64)).reshape(*shape[:2], -1).sum(axis=2)
    np.testing.assert_array_equal(packet.decode()["w"].numpy(), normalized(v, threshold_for(mass, keep_ratio)))


def test_every_tensor_has_its_own_threshold():
    v = uneven((40, 50))
    x = {"a": torch.from_numpy(v), "b": torch.from_numpy(1000 * v)}
    packet, _ = Structured(keep_ratio=0.1).encode(x, {}, RNG)
    assert torch.equal(packet.support()["a"], packet.support()["b"])
    assert packet.parts["a.values"].size / 2000 == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"keep_ratio": 0.1, "threshold": 0.3}, ["keep_ratio", "threshold"]),
        ({"keep_ratio": 0.1, "scores": "raw"}, ["keep_ratio", "scores"]),
        ({"threshold": 1.5}, ["threshold=1.5", "[0, 1]"]),
        ({"keep_ratio": 0.0}, ["keep_ratio=0.0", "(0, 1]"]),
        ({"threshold": -0.1}, ["threshold=-0.1", "at least 0"]),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], names: list[str]):
    with refused(names=names):
        Structured(**settings)


@pytest.mark.parametrize("settings", [{}, {"keep_ratio": 0.2}, {"threshold": 2.0, "scores": "raw"}])
def test_settings_survive_being_written_down(settings: dict[str, Any]):
    made = Structured(**settings)
    assert Structured(**made.model_dump()) == made
