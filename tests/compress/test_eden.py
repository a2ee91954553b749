"""EDEN beside a reference with whole Hadamard matrices, its errors, its bits, and two sparse vectors."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet
from rayfl.compress.eden import Eden
from tests.refusals import refused

NUMBERS = {1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1519]}


def encode(compressor: Eden, v: torch.Tensor, seed: int = 0) -> Packet:
    return compressor.encode({"w": v}, {}, np.random.default_rng(seed))[0]


def normal(size: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def errors(compressor: Eden, vectors: list[torch.Tensor]) -> list[float]:
    """||C(v) - v||^2 / ||v||^2 of each, by one generator."""
    generator, found = np.random.default_rng(5), []
    for v in vectors:
        decoded = compressor.encode({"w": v}, {}, generator)[0].decode()["w"]
        found.append(float((decoded.double() - v.double()).square().sum() / v.double().square().sum()))
    return found


def reference(v: np.ndarray, bits: int, scale: str, rotations: int, seed: int) -> np.ndarray:
    """S R^T q(R v sqrt(D) / ||v||) of one block, with the matrix R."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < v.size:
        hadamard = np.kron(hadamard, [[1, 1], [1, -1]])
    signs = 1.0 - 2 * np.random.Generator(np.random.PCG64(seed)).integers(0, 2, (rotations + 1, v.size), np.int8)
    matrix = np.eye(v.size)
    for row in signs[:rotations]:
        matrix = hadamard / math.sqrt(v.size) @ np.diag(row) @ matrix
    rotated = matrix @ v
    given = rotated * math.sqrt(v.size) / np.linalg.norm(v)
    magnitudes = np.array(NUMBERS[bits])
    nearest = magnitudes[np.abs(np.abs(given)[:, None] - magnitudes).argmin(axis=1)] * np.sign(given)
    product = rotated @ nearest
    return matrix.T @ nearest * (v @ v / product if scale == "unbiased" else product / (nearest @ nearest))


@pytest.mark.parametrize("rotations", [1, 2])
@pytest.mark.parametrize("scale", ["unbiased", "least"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_what_arrives_is_that_of_the_papers(bits: int, scale: str, rotations: int):
    v = normal(64)
    packet = encode(Eden(bits=bits, scale=scale, rotations=rotations), v)  # type: ignore[arg-type]
    wanted = reference(v.double().numpy(), bits, scale, rotations, int(packet.parts["seed"][0]))
    assert np.abs(packet.decode()["w"].numpy() - wanted).max() < 1e-5


@pytest.mark.parametrize(("bits", "lost"), [(1, 0.5708), (2, 0.1331), (3, 0.0358), (4, 0.0096)])
def test_the_errors_are_those_of_normal_numbers(bits: int, lost: float):
    vectors = [normal(4096, seed) for seed in range(80)]
    assert np.mean(errors(Eden(bits=bits), vectors)) == pytest.approx(lost, rel=0.03)
    # 1 / (1 - d) - 1 with the distortion d of the quantizer, which is the error of the other scale.
    least = np.mean(errors(Eden(bits=bits, scale="least"), vectors[:40]))
    assert least == pytest.approx(lost / (1 + lost), rel=0.03)


@pytest.mark.parametrize("first", [[2.0, 1.0], [1.0]])
def test_two_rotations_are_unbiased_for_sparse_vectors(first: list[float]):
    v, count = torch.zeros(4096), 400
    v[: len(first)] = torch.tensor(first)
    generator, compressor = np.random.default_rng(8), Eden()
    total, squares = np.zeros(4096), np.zeros(4096)
    for _ in range(count):
        decoded = compressor.encode({"w": v}, {}, generator)[0].decode()["w"].double().numpy()
        total += decoded
        squares += decoded**2
    mean = total / count
    deviation = np.sqrt((squares / count - mean**2) / count)
    # Of 4096 normal numbers one is above 4.9 once in 250 times. The entry of (1, 0, ...) is exact but for rounding.
    assert (np.abs(mean - v.numpy()) < 4.9 * deviation + 1e-5).all()


def test_one_rotation_is_not_enough():
    v = torch.zeros(256)
    v[:2] = torch.tensor([2.0, 1.0])
    for seed in range(5):
        decoded = encode(Eden(rotations=1), v, seed).decode()["w"]
        assert decoded[:2].tolist() == pytest.approx([2.5, 0.0], abs=1e-5) and decoded[2:].abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_two_equal_entries_attain_the_bound_of_drive(seed: int):
    v = torch.zeros(64)
    v[7] = v[40] = 3.0
    compressor = Eden(scale="least", rotations=1)
    assert compressor.expected_delta(64) == 0.5
    assert errors(compressor, [v]) == pytest.approx([0.5], abs=1e-6)


def test_the_unbiased_scale_keeps_the_length_along_v():
    # <C(v), v> = S <z, q> = ||v||^2 in every block.
    v = normal(1000)
    for bits in (1, 2, 3, 4):
        decoded = encode(Eden(bits=bits), v).decode()["w"].double()
        assert float(decoded @ v.double()) == pytest.approx(float(v.double() @ v.double()), rel=1e-5)


def test_more_bits_lose_less():
    lost = [np.mean(errors(Eden(bits=bits, scale="least"), [normal(700)])) for bits in (1, 2, 3, 4)]
    assert all(after < before / 2 for before, after in pairwise(lost))


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (0, []),
        (1, [1]),
        (5, [8]),
        (31, [32]),
        (32, [32]),
        (33, [32, 1]),
        (650, [512, 128, 16]),
        (2**16, [2**16]),
        (2 * 2**16 + 2**15 + 40, [2**16, 2**16, 2**15, 32, 8]),
    ],
)
def test_blocks_halve_and_padding_is_billed(size: int, blocks: list[int]):
    for bits in (1, 3):
        packet = encode(Eden(bits=bits), normal(size))
        assert packet.num_bits == 64 + 32 * len(blocks) + 8 * math.ceil(bits * sum(blocks) / 8)
        assert packet.decode()["w"].shape == (size,) and packet.num_values == size


def test_a_block_of_one_entry_and_a_block_of_zeros_are_exact():
    v = torch.cat([torch.zeros(32), torch.tensor([-0.7])])
    for bits in (1, 4):
        assert torch.allclose(encode(Eden(bits=bits), v).decode()["w"], v, rtol=1e-6)


def test_the_largest_numbers_arrive_as_finite_numbers():
    v = torch.full((64,), 3.4e38)
    v[::3] *= -0.9
    assert encode(Eden(scale="least"), v).decode()["w"].isfinite().all()
    with refused(names=["'w'", "infinity", "float32"], error=ValueError):
        encode(Eden(bits=4), torch.tensor([3.4e38]))


def test_more_than_four_bits_are_refused():
    with refused(names=["bits", 5, "[1, 4]"]):
        Eden(bits=5)
