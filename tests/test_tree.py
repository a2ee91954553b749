"""Arithmetic on trees, and the way of states to numpy and back."""

import math
import pickle

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.tree import PackedBits


def pair() -> tuple[tree.Tree, tree.Tree]:
    return (
        {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])},
        {"w": torch.tensor([[1.0, 0.0], [-1.0, 2.0]]), "b": torch.tensor([-2.0])},
    )


def numbers(x: tree.Tree) -> list[float]:
    return tree.vector(x).tolist()


def test_arithmetic():
    a, b = pair()
    assert numbers(tree.add(a, b)) == [2, 2, 2, 6, 3]
    assert numbers(tree.add(a, b, -0.5)) == [0.5, 2, 3.5, 3, 6]
    assert numbers(tree.sub(a, b)) == [0, 2, 4, 2, 7]
    assert numbers(tree.mul(a, b)) == [1, 0, -3, 8, -10]
    assert numbers(tree.scale(a, 2.0)) == [2, 4, 6, 8, 10]
    assert numbers(tree.zeros_like(a)) == [0, 0, 0, 0, 0]
    assert numbers(tree.map(torch.neg, a)) == [-1, -2, -3, -4, -5]
    # 1 + 0 - 3 + 8 - 10, and 1 + 4 + 9 + 16 + 25.
    assert tree.dot(a, b) == -4.0
    assert tree.norm(a) == pytest.approx(math.sqrt(55), rel=1e-7)
    assert tree.num_entries(a) == 5
    assert [numbers(x) for x in (a, b)] == [[1, 2, 3, 4, 5], [1, 0, -1, 2, -2]]


def test_a_mask_times_weights():
    weights, _ = pair()
    mask = {"w": torch.tensor([[True, False], [False, True]]), "b": torch.tensor([False])}
    assert numbers(tree.mul(weights, mask)) == [1, 0, 0, 4, 0]


def test_unvector_undoes_vector_in_memory_of_its_own():
    a, _ = pair()
    flat = tree.vector(a)
    back = tree.unvector(flat, a)
    assert [(name, tensor.tolist()) for name, tensor in back.items()] == [(n, t.tolist()) for n, t in a.items()]
    flat.zero_()
    assert numbers(back) == [1, 2, 3, 4, 5]


def test_a_state_goes_to_numpy_and_back():
    state = {
        "residual": {"w": torch.tensor([1.5, -2.0]), "empty": torch.zeros(0, 3)},
        "mask": {"w": torch.tensor([[True, False, True], [False, False, True], [True, True, True]])},
        "count": torch.tensor(3),
        "none": {},
    }
    arrays = tree.to_arrays(state)
    # Nine entries in two bytes: 10100111 and 1 with seven zeros behind it.
    assert isinstance(arrays["mask"]["w"], PackedBits)
    assert arrays["mask"]["w"].bits.tolist() == [0b10100111, 0b10000000]
    back = tree.to_tensors(pickle.loads(pickle.dumps(arrays)))  # noqa: S301 - our own bytes
    assert list(back) == list(state) and back["none"] == {}
    flat, wanted = tree.flatten(back), tree.flatten(state)
    assert list(flat) == ["residual/w", "residual/empty", "mask/w", "count"]
    for name, tensor in flat.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 5), (0,)])
def test_masks_of_any_shape(shape: tuple[int, ...]):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(tree.to_tensors(tree.to_arrays({"mask": mask}))["mask"], mask)


def test_what_is_no_tensor_passes_through():
    handle = object()
    assert tree.to_tensors(tree.to_arrays({"models": {"3": handle}}))["models"]["3"] is handle


def test_aligned_arrays_are_looked_at_and_others_copied():
    """Matrix products give other bits on buffers that are not aligned as torch's own are."""
    buffer = np.arange(64, dtype=np.float32)
    start = next(i for i in range(16) if buffer[i:].ctypes.data % tree.ALIGNMENT_BYTES == 0)
    aligned, shifted = buffer[start : start + 8], buffer[start + 1 : start + 9]
    assert tree.tensor_over(aligned).data_ptr() == aligned.ctypes.data
    copy = tree.tensor_over(shifted)
    assert copy.data_ptr() != shifted.ctypes.data and copy.data_ptr() % tree.ALIGNMENT_BYTES == 0
    assert copy.tolist() == shifted.tolist()
    for number in (buffer[start : start + 1].reshape(()), buffer[start + 1 : start + 2].reshape(())):
        assert tree.tensor_over(number).shape == ()
    strided = buffer[start : start + 8 : 2]
    assert tree.tensor_over(strided).is_contiguous() and tree.tensor_over(strided).tolist() == strided.tolist()
