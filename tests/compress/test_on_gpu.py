"""Operations for tensors of a GPU, on a CPU: the same choice and the same bytes as numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress import on_gpu
from rayfl.compress.on_gpu import TensorPlaces, largest, packed_bits
from rayfl.compress.positions import BITMAP, GAPS, GOLOMB, PACKED, encode_places, encode_positions
from rayfl.compress.sparse import TopK, top_k_positions
from rayfl.tree import pack_bits


def test_only_tensors_of_a_gpu_are_encoded_there():
    assert not on_gpu.on_gpu(torch.zeros(3))
    assert not on_gpu.on_gpu(torch.zeros(3, device="meta"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.5, -2.5, 1e-45]), max_size=30), st.integers(0, 30))
def test_the_largest_entries_and_of_ties_the_first(numbers: list[float], k: int):
    x = torch.tensor(numbers, dtype=torch.float32)
    k = min(k, len(numbers))
    mask = largest(x, k)
    assert mask.nonzero().flatten().tolist() == top_k_positions(x.numpy(), k).tolist()


@pytest.mark.parametrize(
    ("size", "chosen", "code"),
    [
        (1000, np.arange(0, 1000, 3), BITMAP),
        (10_000, np.arange(7, 10_000, 11), GAPS),
        # A gap of 600 takes two escapes.
        (10_000, np.concatenate([np.arange(0, 5000, 7), np.arange(5600, 10_000, 9)]), GAPS),
        (2**20, np.array([0, 2**20 - 1]), PACKED),
        (100_000, np.sort(np.random.default_rng(0).choice(100_000, 150, replace=False)), GOLOMB),
        (40, np.array([39]), GAPS),
        (64, np.arange(64), None),
        (64, np.array([], np.int64), None),
    ],
)
def test_places_have_the_bytes_of_positions(size: int, chosen: np.ndarray, code: int | None):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(chosen)] = True
    places, wanted = TensorPlaces(mask), encode_positions(chosen, size)
    assert encode_places(places).tobytes() == wanted.tobytes()
    assert (wanted[-1] if wanted.size else None) == code
    assert places.positions().tolist() == chosen.tolist()
    assert places.int32().tobytes() == chosen.astype(np.int32).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_bits_are_packed_as_in_main_memory(bits: list[bool]):
    mask = torch.tensor(bits, dtype=torch.bool)
    assert packed_bits(mask).tobytes() == pack_bits(mask).tobytes()


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_a_large_tree_has_the_same_packet(scope, values, monkeypatch: pytest.MonkeyPatch):
    """Large enough for numpy's guess of a threshold, with ties in it."""
    draw = np.random.default_rng(0)
    x = {
        "w": torch.from_numpy(draw.standard_normal(300_000).astype(np.float32).round(2)),
        "b": torch.from_numpy(draw.standard_normal((3, 50)).astype(np.float32)),
        "half": torch.from_numpy(draw.standard_normal(500)),
    }
    compressor = TopK(keep_ratio=0.1, scope=scope, values=values)
    packet, _ = compressor.encode(x, {}, draw)
    monkeypatch.setattr(on_gpu, "on_gpu", lambda tensor: True)
    other, _ = compressor.encode(x, {}, draw)
    assert {name: part.tobytes() for name, part in packet.parts.items()} == {
        name: part.tobytes() for name, part in other.parts.items()
    }


def test_what_is_not_finite_is_refused_there_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_gpu, "on_gpu", lambda tensor: True)
    with pytest.raises(ValueError, match="tensor 'w' holds NaN or infinity"):
        TopK().encode({"w": torch.tensor([1.0, torch.nan])}, {}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="too large for fp16"):
        TopK(values="fp16").encode({"w": torch.tensor([1e6])}, {}, np.random.default_rng(0))
