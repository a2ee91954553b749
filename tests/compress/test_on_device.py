"""topk, sign and dense encode tensors of a GPU on the GPU: the same choice and the same bytes as in main memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.masks import known_support_packet, mask_packet
from rayfl.compress.sign import ScaledSign
from rayfl.compress.sparse import TopK, sparse_packet, top_k_positions
from rayfl.compress.values import is_on_device
from rayfl.tree import Tree
from tests.contracts.every_compressor import label
from tests.pretended_gpu import PretendedGpu, on_gpu
from tests.refusals import refused


def test_main_memory_is_no_device():
    assert not is_on_device(torch.zeros(3)) and not is_on_device(torch.zeros(3, device="meta"))
    assert is_on_device(on_gpu(torch.zeros(3)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.5, -2.5, 1e-45]), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_largest_entries_and_of_ties_the_first(numbers: list[float], keep_ratio: float):
    x, compressor = torch.tensor(numbers, dtype=torch.float32), TopK(keep_ratio=keep_ratio)
    with PretendedGpu():
        values, selection = compressor.select({"w": on_gpu(x)}, np.random.default_rng(0))
    wanted = top_k_positions(x.numpy(), compressor.most_kept(x.numel()))
    assert selection.positions["w"].tolist() == wanted.tolist()
    assert values["w"].tolist() == x[torch.from_numpy(wanted)].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.5]), max_size=40))
def test_signs_are_packed_as_in_main_memory(numbers: list[float]):
    x = {"w": torch.tensor(numbers)}
    assert sent_from_device(ScaledSign(), x)[0] == sent(ScaledSign(), x)


@pytest.mark.parametrize(("last", "added_again"), [(-1 - 2.0**-23, False), (-1.0, True)])
def test_a_sum_counts_only_where_every_order_of_additions_is_rounded_alike(last: float, added_again: bool):
    """The mean of 1 + 2^-23 and 1 lies halfway between two float32, so that a rounding error would decide."""
    x = {"w": torch.tensor([1 + 2.0**-23, -1.0, 1 + 2.0**-23, last])}
    found, copied = sent_from_device(ScaledSign(), x)
    assert found == sent(ScaledSign(), x)
    # The four entries are copied only if numpy adds them again.
    assert (16 in copied) == added_again


def large() -> Tree:
    """Large enough for numpy's guess of a threshold, with ties in it."""
    draw = np.random.default_rng(0)
    return {
        "w": torch.from_numpy(draw.standard_normal(300_000).astype(np.float32).round(2)),
        "b": torch.from_numpy(draw.standard_normal((3, 50)).astype(np.float32)),
        "half": torch.from_numpy(draw.standard_normal(500)),
    }


def sent(compressor: Compressor, x: Tree) -> dict[str, bytes]:
    packet, _ = compressor.encode(x, compressor.init(x), np.random.default_rng(5))
    return {name: part.tobytes() for name, part in packet.parts.items()}


def sent_from_device(compressor: Compressor, x: Tree) -> tuple[dict[str, bytes], list[int]]:
    """The buffers, and the bytes of each copy to main memory."""
    with PretendedGpu() as gpu:
        return sent(compressor, {name: on_gpu(tensor) for name, tensor in x.items()}), gpu.downloads


@pytest.mark.parametrize(
    ("compressor", "bytes_per_entry"),
    [
        # A float32 and an int32 for each kept entry.
        *((TopK(scope=scope, values=v), 0.8) for scope in ("tensor", "model") for v in ("fp32", "fp16", "bf16")),
        (ScaledSign(), 1 / 8),
        (Dense(dtype="bf16"), 2),
    ],
    ids=lambda value: label(value) if isinstance(value, Compressor) else "",
)
def test_a_large_tree_has_the_same_packet_and_little_is_copied(compressor: Compressor, bytes_per_entry: float):
    found, downloads = sent_from_device(compressor, large())
    assert found == sent(compressor, large())
    # Besides, the few numbers that the processor looks at.
    assert sum(downloads) <= bytes_per_entry * 300_650 + 100


def test_what_is_not_finite_or_too_large_is_refused_on_the_device_too():
    with refused(names=["'w'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        sent_from_device(TopK(), {"w": torch.tensor([1.0, torch.nan])})
    with refused(names=["'w'", "1e+06", "fp16", "bf16"]):
        sent_from_device(TopK(values="fp16"), {"w": torch.tensor([1e6])})


def test_masks_and_values_at_known_places_may_lie_on_the_device():
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
