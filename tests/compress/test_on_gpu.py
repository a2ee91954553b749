"""Operations for tensors of a GPU, on a CPU: the same choice and the same bytes as numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rayfl.compress.on_gpu
from rayfl.compress import bits
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.known_support import known_support_packet
from rayfl.compress.mask import mask_packet
from rayfl.compress.natural import Natural
from rayfl.compress.on_gpu import TensorPlaces, largest, packed, packed_bits, packed_trits, rounded
from rayfl.compress.positions import BITMAP, GAPS, GOLOMB, PACKED, encode_places, encode_positions
from rayfl.compress.quantize import Quantize, TernGrad
from rayfl.compress.sign import OneBit, ScaledSign
from rayfl.compress.sparse import TopK, sparse_packet, top_k_positions
from rayfl.compress.ternary import Ternary
from rayfl.tree import Tree, pack_bits
from tests.contracts.every_compressor import label
from tests.pretended_gpu import PretendedGpu, on_gpu
from tests.refusals import refused


def test_only_tensors_of_a_gpu_are_encoded_there():
    assert not rayfl.compress.on_gpu.on_gpu(torch.zeros(3))
    assert not rayfl.compress.on_gpu.on_gpu(torch.zeros(3, device="meta"))
    assert rayfl.compress.on_gpu.on_gpu(on_gpu(torch.zeros(3)))


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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.data())
def test_codes_are_packed_as_in_main_memory(width: int, data: st.DataObject):
    codes = np.array(data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40)), np.uint16)
    wanted = bits.pack(codes.astype(np.uint8) if width <= 8 else codes, width)
    assert packed(torch.from_numpy(codes.astype(np.int32)), width).tobytes() == wanted.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_trits_are_packed_as_in_main_memory(digits: list[int]):
    array = np.array(digits, np.uint8)
    assert packed_trits(torch.from_numpy(array)).tobytes() == bits.pack_trits(array).tobytes()


def test_a_sum_counts_where_every_order_is_rounded_alike():
    """Halfway between two float32, 1 and 1 + 2^-23, an error decides; beside that no order of 1000 additions does."""

    def finish(sums: np.ndarray) -> np.ndarray:
        return sums.astype(np.float32)

    assert rounded(torch.tensor([1 + 2.0**-24, 1.0], dtype=torch.float64), 2, finish) is None
    found = rounded(torch.tensor([1 + 2.0**-24 + 2.0**-40, 0.0, -1.1], dtype=torch.float64), 1000, finish)
    assert found is not None and found.dtype == np.float32
    assert found.tolist() == [1 + 2.0**-23, 0.0, float(np.float32(-1.1))]


def large() -> Tree:
    """Large enough for numpy's guess of a threshold and for several pieces of a quantizer, with ties in it."""
    draw = np.random.default_rng(0)
    return {
        "w": torch.from_numpy(draw.standard_normal(300_000).astype(np.float32).round(2)),
        "b": torch.from_numpy(draw.standard_normal((3, 50)).astype(np.float32)),
        "half": torch.from_numpy(draw.standard_normal(500)),
    }


def sent(compressor: Compressor, x: Tree) -> dict[str, bytes]:
    packet, _ = compressor.encode(x, compressor.init(x), np.random.default_rng(5))
    return {name: part.tobytes() for name, part in packet.parts.items()}


def sent_there(compressor: Compressor, x: Tree) -> tuple[dict[str, bytes], list[int]]:
    """The buffers, and the bytes of each copy to main memory."""
    with PretendedGpu() as gpu:
        return sent(compressor, {name: on_gpu(tensor) for name, tensor in x.items()}), gpu.downloads


LARGE = [
    *(TopK(scope=scope, values=values) for scope in ("tensor", "model") for values in ("fp32", "fp16", "bf16")),
    *(Quantize(norm=norm, bucket=bucket) for norm in ("1", "2", "inf") for bucket in (0, 512, 200_000)),
    Quantize(levels=300, coding="elias"),
    TernGrad(),
    Natural(),
    ScaledSign(),
    OneBit(),
    Ternary(),
]


@pytest.mark.parametrize("compressor", LARGE, ids=label)
def test_a_large_tree_has_the_same_packet(compressor: Compressor):
    assert sent_there(compressor, large())[0] == sent(compressor, large())


@pytest.mark.parametrize("compressor", [Quantize(), Quantize(norm="1"), ScaledSign(), OneBit()], ids=label)
def test_a_sum_that_another_order_may_change_is_made_in_main_memory(compressor: Compressor, monkeypatch):
    monkeypatch.setattr("rayfl.compress.on_gpu.rounded", lambda sums, num_added, finish: None)
    found, downloads = sent_there(compressor, large())
    assert found == sent(compressor, large())
    # All float32 of the largest tensor.
    assert max(downloads) == 1_200_000


@pytest.mark.parametrize(
    ("compressor", "beside"),
    [
        # A norm or a scale travels in float64; of `half` and `b` also the counts of negative numbers.
        (ScaledSign(), 100),
        (OneBit(), 200),
        (Quantize(), 4000),
        (TernGrad(), 100),
        (Natural(), 100),
        (TopK(), 100),
        (TopK(values="fp16"), 100),
        (Dense(dtype="bf16"), 100),
    ],
    ids=label,
)
def test_no_more_travels_than_is_sent(compressor: Compressor, beside: int):
    """But for a few numbers that the processor looks at."""
    found, downloads = sent_there(compressor, large())
    assert sum(downloads) <= sum(map(len, found.values())) + beside
    # Single numbers apart, each buffer travels once.
    assert sum(size > 8 for size in downloads) <= 2 * len(found)


def test_what_is_not_finite_or_too_large_is_refused_there_too():
    with refused(names=["'w'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        sent_there(TopK(), {"w": torch.tensor([1.0, torch.nan])})
    with refused(names=["'w'", "1e+06", "fp16", "bf16"]):
        sent_there(TopK(values="fp16"), {"w": torch.tensor([1e6])})


def test_masks_and_values_at_known_places_are_encoded_there():
    values = {"w": torch.arange(1.0, 12.0).view(11, 1), "b": torch.tensor(2.0)}
    masks = {"w": values["w"] % 3 == 0, "b": torch.tensor(True)}
    made = [mask_packet, lambda masks: known_support_packet(values, masks), lambda masks: sparse_packet(values, masks)]
    wanted = [make(masks) for make in made]
    with PretendedGpu():
        here, values = values, {name: on_gpu(tensor) for name, tensor in values.items()}
        found = [make({name: on_gpu(tensor) for name, tensor in masks.items()}) for make in made]
        # A mask that lies in main memory may be that of values on a GPU.
        found.append(sparse_packet(values, masks))
    for packet, other in zip([*wanted, sparse_packet(here, masks)], found, strict=True):
        assert {name: part.tobytes() for name, part in packet.parts.items()} == {
            name: part.tobytes() for name, part in other.parts.items()
        }
