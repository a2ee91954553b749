"""Carries that travel as one buffer arrive as they were sent."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from rayfl.data.transfer import PAGE, offsets, pack, stack, to_device, to_memory, unpack, unstack
from rayfl.methods.base import Carry
from tests.pretended_gpu import GPU, PretendedGpu

CPU = torch.device("cpu")


def carry(seed: int) -> Carry:
    """Leaves of all types and ranks that methods have."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "params": {"w": torch.randn(3, 5, generator=draw), "b": torch.randn(7, generator=draw)},
        "mask": {"w": torch.rand(3, 5, generator=draw) < 0.5},
        "loss": torch.randn((), generator=draw),
        "steps": torch.tensor(seed),
        "exact": torch.randn(2, generator=draw, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }


def assert_equal(a: Carry, b: Carry) -> None:
    (leaves, spec), (others, other_spec) = tree_flatten(a), tree_flatten(b)
    assert spec == other_spec
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.dtype == other.dtype and torch.equal(leaf, other)


def test_a_buffer_holds_every_leaf_at_the_start_of_a_page():
    flat = [tree_flatten(carry(seed))[0] for seed in range(3)]
    columns = list(zip(*flat, strict=True))
    shapes = [(torch.Size([3, *column[0].shape]), column[0].dtype) for column in columns]
    buffer = pack(columns)
    starts, size = offsets(shapes)
    assert buffer.nbytes == size and all(start % PAGE == 0 for start in starts)
    for leaf, column in zip(unpack(buffer, shapes), columns, strict=True):
        assert leaf.is_contiguous() and torch.equal(leaf, torch.stack(column))


def test_only_what_lies_on_the_device_is_copied_back():
    leaves = tree_flatten(carry(4))[0]
    with PretendedGpu() as gpu:
        found = to_memory([leaves[0], *to_device(leaves[1:], GPU)], GPU)
    assert found[0] is leaves[0] and (len(gpu.uploads), len(gpu.downloads)) == (1, 1)
    for leaf, one in zip(leaves, found, strict=True):
        assert leaf.dtype == one.dtype and torch.equal(leaf, one)


@pytest.mark.parametrize("width", [3, 5])
def test_a_stack_is_the_same_by_one_buffer_as_leaf_by_leaf(width: int):
    own = [carry(seed) for seed in range(3)]
    plain = stack(own, width, CPU)
    with PretendedGpu():
        buffered = to_memory(stack(own, width, GPU), GPU)
    assert_equal(plain, buffered)
    assert plain["params"]["w"].shape == (width, 3, 5)
    for row, (one, found) in enumerate(zip(own, unstack(buffered, 3), strict=True)):
        assert_equal(one, found)
        assert_equal(tree_map(lambda leaf, row=row: leaf[row], plain), found)
        for leaf in tree_flatten(found)[0]:
            assert leaf.untyped_storage().nbytes() == leaf.nbytes


def test_a_stack_goes_to_a_gpu_and_comes_back_by_one_copy():
    own = [carry(seed) for seed in range(3)]
    with PretendedGpu() as gpu:
        stacked = stack(own, 5, GPU)
        assert all(leaf.device == GPU and len(leaf) == 5 for leaf in tree_flatten(stacked)[0])
        assert (len(gpu.uploads), gpu.downloads) == (1, [])
        back = unstack(to_memory(stacked, GPU), 3)
    assert (len(gpu.uploads), len(gpu.downloads)) == (1, 1)
    for one, found in zip(own, back, strict=True):
        assert_equal(one, found)


def test_a_stack_of_what_lies_on_a_gpu_travels_nowhere_but_for_what_a_hook_made_in_main_memory():
    own = [carry(seed) for seed in range(3)]
    with PretendedGpu() as gpu:
        begun = [to_device(one, GPU) for one in own]
        del gpu.uploads[:]
        for one, plain in zip(begun, own, strict=True):
            one["steps"], one["loss"] = plain["steps"], plain["loss"]
        rows = unstack(stack(begun, 4, GPU), 3)
        assert len(gpu.uploads) == 1 and gpu.uploads[0] == 2 * PAGE and gpu.downloads == []
        assert all(leaf.device == GPU for row in rows for leaf in tree_flatten(row)[0])
        for one, row in zip(own, rows, strict=True):
            assert_equal(one, to_memory(row, GPU))


def test_a_single_carry_goes_to_a_gpu_and_comes_back_by_one_copy():
    with PretendedGpu() as gpu:
        gone = to_device(carry(1), GPU)
        assert all(leaf.device == GPU for leaf in tree_flatten(gone)[0])
        assert_equal(to_memory(gone, GPU), carry(1))
        assert (len(gpu.uploads), len(gpu.downloads)) == (1, 1)
        assert to_device({}, GPU) == to_memory({}, GPU) == {}


def test_on_a_cpu_a_single_carry_does_not_move():
    one = carry(0)
    assert to_device(one, CPU) is one and to_memory(one, CPU) is one
