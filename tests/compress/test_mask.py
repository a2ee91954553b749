"""Masks at one bit an entry."""

import math
import pickle

import pytest
import torch

from rayfl.compress.masks import coded_mask_packet, mask_packet
from rayfl.tree import pack_bits, unpack_bits


def test_the_first_entry_is_the_highest_bit():
    mask = torch.tensor([[True, False, False], [False, True, True], [True, False, True]])
    assert pack_bits(mask).tolist() == [0b10001110, 0b10000000]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (8,), (3, 3), (5, 2, 13)])
def test_masks_come_back(shape: tuple[int, ...]):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(mask)
    assert bits.nbytes == -(-mask.numel() // 8)
    assert torch.equal(unpack_bits(bits, shape), mask)


def test_a_packet_bills_whole_bytes_a_tensor():
    mask = {"w": torch.ones(3, 3, dtype=torch.bool), "b": torch.zeros(8, dtype=torch.bool)}
    packet = mask_packet(mask)
    assert packet.num_bits == 8 * (2 + 1)
    decoded = pickle.loads(pickle.dumps(packet)).decode()  # noqa: S301 - our own bytes
    assert all(torch.equal(decoded[name], tensor) for name, tensor in mask.items())
    assert all(tensor.all() and tensor.dtype == torch.bool for tensor in packet.support().values())


def test_adding_masks_counts_them():
    total = {"w": torch.zeros(3)}
    for row in ([True, False, True], [True, True, False]):
        mask_packet({"w": torch.tensor(row)}).add_to(total, 1.0)
    mask_packet({"w": torch.tensor([True, False, False])}).add_to(total, 0.5)
    assert total["w"].tolist() == [2.5, 1.0, 1.0]


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match="boolean"):
        mask_packet({"w": torch.ones(2)})


def test_a_mask_on_strides_is_packed_row_by_row():
    mask = torch.tensor([[True, False], [True, False]]).T
    assert pack_bits(mask).tolist() == [0b11000000]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.3, 0.45, 0.6, 0.9, 0.999, 1.0])
def test_a_coded_mask_takes_little_more_than_its_entropy(share: float):
    mask = torch.rand(40, 1000, generator=torch.Generator().manual_seed(1)) < share
    packet = coded_mask_packet({"w": mask, "few": mask[:1, :3]})
    decoded = pickle.loads(pickle.dumps(packet)).decode()  # noqa: S301 - our own bytes
    assert torch.equal(decoded["w"], mask) and torch.equal(decoded["few"], mask[:1, :3])
    ones = float(mask.double().mean())
    entropy = -sum(p * math.log2(p) for p in (ones, 1 - ones) if p) * mask.numel()
    assert entropy <= packet.num_bits <= min(1.04 * entropy + 40, mask.numel() + 8) + 8 + 16
    total = {"w": torch.zeros(40, 1000), "few": torch.zeros(1, 3)}
    packet.add_to(total, 0.5)
    assert torch.equal(total["w"], mask.float() / 2)
