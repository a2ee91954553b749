"""Quantisers against closed forms: probabilities, second moments, worst cases, bytes, and the ends of float32."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.quantize import QSGD, Coding, Norm, Quantize, TernGrad
from tests.compress.even import Even
from tests.refusals import refused

LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149


def encode(compressor: Compressor, v: torch.Tensor, seed: int = 0) -> Packet:
    return compressor.encode({"w": v}, {}, np.random.default_rng(seed))[0]


def decode(compressor: Compressor, v: torch.Tensor, seed: int = 0) -> np.ndarray:
    return encode(compressor, v, seed).decode()["w"].double().numpy()


def draws(compressor: Compressor, v: torch.Tensor, count: int) -> np.ndarray:
    """[count, n] decoded vectors."""
    generator = np.random.default_rng(3)
    decoded = [compressor.encode({"w": v}, {}, generator)[0].decode()["w"].double().numpy() for _ in range(count)]
    return np.stack(decoded)


def by_definition(v: np.ndarray, norm: str, s: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower value, upper value and the probability of the upper one, in one bucket."""
    scale = np.linalg.norm(v, {"1": 1, "2": 2, "inf": np.inf}[norm])
    x = s * np.abs(v) / scale
    level = np.minimum(np.floor(x), s - 1)
    return scale * np.sign(v) * level / s, scale * np.sign(v) * (level + 1) / s, x - level


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("s", [1, 2, 3, 7, 127, 128, 32767])
def test_only_the_two_neighbouring_levels_with_their_probabilities(norm: Norm, s: int):
    v = np.array([0.5, -0.25, 0.75, 0.0, -1.0, 0.1])
    lower, upper, up = by_definition(v, norm, s)
    decoded = draws(Quantize(norm=norm, levels=s), torch.tensor(v, dtype=torch.float32), 800)
    # float32 arithmetic: 2^-22 of the norm.
    near_upper = np.isclose(decoded, upper, rtol=0, atol=2**-22 * 3)
    assert (near_upper | np.isclose(decoded, lower, rtol=0, atol=2**-22 * 3)).all()
    # Where the levels lie closer than that, nothing can be told apart; else five standard deviations.
    if s <= 128:
        clear = (v != 0) & (up > 1e-3) & (up < 1 - 1e-3)
        assert (np.abs(near_upper.mean(axis=0) - up)[clear] <= 5 * np.sqrt(up * (1 - up) / 800)[clear]).all()


@pytest.mark.parametrize(("s", "entry", "ups"), [(1, 0.3125, 20), (4, 0.3125, 16), (2, -0.3125, 40), (1, -1.0, 64)])
def test_frequencies_are_exact_under_even_draws(s: int, entry: float, ups: int):
    # s |v| = level + fraction with N = 1: 0.3125 = 20/64; 1.25 = 1 + 16/64; 0.625 = 40/64.
    v = torch.full((65,), entry)
    v[64] = 1.0
    packet, _ = Quantize(norm="inf", levels=s, bucket=0).encode({"w": v}, {}, Even(64))
    decoded = packet.decode()["w"][:64]
    top = math.copysign((min(math.floor(abs(entry) * s), s - 1) + 1) / s, entry)
    assert (decoded == top).sum() == ups
    assert decoded.double().mean() == entry


def test_levels_are_never_left_once_met():
    # Entries that are multiples of N / s have one possible level.
    v = torch.arange(-127, 128, dtype=torch.float32) / 127 * 3.0
    for seed in range(20):
        error = np.abs(decode(Quantize(norm="inf", levels=127, bucket=0), v, seed) - v.double().numpy())
        # x may come out a hair below its level, which happens with that hair's probability.
        assert error.max() <= 3 * 2**-22


@pytest.mark.parametrize("norm", get_args(Norm))
def test_second_moment_of_one_level(norm: Norm):
    # s = 1: N with probability |v_i| / N, so E||C||^2 = N ||v||_1.
    v = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    decoded = draws(Quantize(norm=norm, levels=1), torch.from_numpy(v), 4000)
    moments = (decoded**2).sum(axis=1)
    scale = np.linalg.norm(v.astype(float), {"1": 1, "2": 2, "inf": np.inf}[norm])
    assert abs(moments.mean() - scale * np.abs(v).sum()) <= 5 * moments.std() / math.sqrt(4000)


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("s", [1, 3, 10])
@pytest.mark.parametrize("d", [1, 2, 50, 512])
def test_omega_bounds_the_exact_variance(norm: Norm, s: int, d: int):
    omega = Quantize(norm=norm, levels=s, bucket=0).omega(d)
    assert omega is not None
    rng = np.random.default_rng(d)
    for v in [rng.standard_normal(d), np.ones(d), rng.standard_normal(d) ** 5, np.eye(d)[0] + 0.5 / math.sqrt(d)]:
        lower, upper, up = by_definition(v, norm, s)
        variance = (up * (1 - up) * (upper - lower) ** 2).sum()
        assert variance <= (omega + 1e-12) * (v**2).sum()


@pytest.mark.parametrize("s", [1, 2, 7])
def test_omega_of_the_inf_norm_is_attained(s: int):
    # One entry is the norm, the d - 1 others u = 1 / (2s (1 + omega)): omega (omega + 1) = (d - 1) / (4 s^2).
    d = 100
    omega = Quantize(norm="inf", levels=s, bucket=0).omega(d)
    assert omega is not None and omega * (omega + 1) == pytest.approx((d - 1) / (4 * s * s))
    v = np.full(d, 1 / (2 * s * (1 + omega)))
    v[0] = 1.0
    lower, upper, up = by_definition(v, "inf", s)
    assert (up * (1 - up) * (upper - lower) ** 2).sum() == pytest.approx(omega * (v**2).sum())


def test_omega_of_the_table():
    assert QSGD(levels=4, bucket=0).omega(100) == min(100 / 16, 10 / 4)
    assert QSGD(levels=64, bucket=0).omega(100) == 100 / 64**2
    assert QSGD(levels=1, bucket=64).omega(10_000) == 7.0  # sqrt(64) - 1: the longest bucket counts
    assert QSGD(levels=1, bucket=64).omega(25) == 4.0
    assert TernGrad().omega(25) == 2.0
    assert Quantize(norm="1", levels=1).omega(9) == 8.0
    assert TernGrad(clip=2.5).omega(25) is None


@pytest.mark.parametrize(("s", "width"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8), (128, 9)])
@pytest.mark.parametrize(("bucket", "num_buckets"), [(512, 2), (100, 10), (0, 1), (1000, 1), (999, 2)])
def test_bits_of_the_fixed_coding(s: int, width: int, bucket: int, num_buckets: int):
    # 1000 (1 + ceil(log2(s + 1))) bits are whole bytes; the second tensor fills up its last byte.
    x = {"w": torch.ones(10, 100), "b": torch.ones(3)}
    packet, _ = Quantize(levels=s, bucket=bucket).encode(x, {}, np.random.default_rng(0))
    assert packet.num_bits == 32 * num_buckets + 1000 * width + 32 + 8 * math.ceil(3 * width / 8)


@pytest.mark.parametrize(
    ("bucket", "size"),
    [(1, 1000), (3, 1000), (100, 300_001), (1000, 999), (131_072, 300_001), (131_073, 300_001), (0, 300_001)],
)
def test_every_bucket_has_its_own_norm(bucket: int, size: int):
    v = torch.from_numpy(np.random.default_rng(2).standard_normal(size).astype(np.float32))
    for norm in get_args(Norm):
        order = {"1": 1, "2": 2, "inf": math.inf}[norm]
        norms = encode(Quantize(norm=norm, bucket=bucket), v).parts["w.norms"]
        wanted = [float(part.double().norm(order)) for part in v.split(bucket or v.numel())]
        np.testing.assert_allclose(norms, wanted, rtol=1e-6)
        error = np.abs(decode(Quantize(norm=norm, bucket=bucket), v) - v.double().numpy())
        assert (error <= 1.001 * np.repeat(norms, bucket or v.numel())[: v.numel()] / 7).all()


def test_elias_sends_the_same_numbers_in_the_bits_of_its_codes():
    v = torch.from_numpy(np.random.default_rng(4).standard_normal(5000).astype(np.float32))
    for s in (1, 7, 200):
        fixed, elias = (encode(QSGD(levels=s, coding=coding), v) for coding in get_args(Coding))
        decoded = fixed.decode()["w"]
        assert torch.equal(elias.decode()["w"], decoded)
        sent = np.flatnonzero(decoded)
        norms = np.repeat(fixed.parts["w.norms"], 512)[:5000]
        levels = np.rint(np.abs(decoded.numpy())[sent] / norms[sent] * s).astype(int)
        numbers = [*np.diff(sent, prepend=-1).tolist(), *levels.tolist()]
        heads, tails = sum(n.bit_length() for n in numbers), sum(n.bit_length() - 1 for n in numbers)
        assert elias.num_bits == 32 * 10 + sum(8 * math.ceil(n / 8) for n in (heads, tails, sent.size))


def test_elias_is_shorter_where_most_levels_are_zero():
    v = torch.from_numpy(np.random.default_rng(5).standard_normal(51_200).astype(np.float32))
    assert encode(QSGD(levels=1, coding="elias"), v).num_bits < 0.25 * encode(QSGD(levels=1), v).num_bits


@pytest.mark.parametrize("coding", get_args(Coding))
def test_zeros_and_nothing(coding: Coding):
    x = {"zero": torch.zeros(600), "none": torch.zeros(0), "part": torch.cat([torch.zeros(512), torch.ones(1)])}
    decoded = QSGD(coding=coding).encode(x, {}, np.random.default_rng(0))[0].decode()
    assert all(torch.equal(decoded[name], tensor) for name, tensor in x.items())


@pytest.mark.parametrize("value", [SMALLEST, 2.0**-126, 1 / 3, -LARGEST])
@pytest.mark.parametrize("norm", get_args(Norm))
def test_a_single_entry_is_exact(norm: Norm, value: float):
    v = torch.tensor([value])
    assert decode(Quantize(norm=norm), v).tolist() == v.double().tolist()


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("s", [1, 4, 7])
def test_norms_beyond_float32_stay_finite_and_unbiased(norm: Norm, s: int):
    # Entries from half of the largest number to all of it: their 2-norm is some 16 times too large.
    v = torch.linspace(0.5, 1.0, 400) * LARGEST
    decoded = draws(Quantize(norm=norm, levels=s), v, 500) / LARGEST
    assert np.isfinite(decoded).all() and decoded.max() <= 1
    wanted = v.double().numpy() / LARGEST
    # A level is 1 / s of the largest number: at most 1 / (2s) for a standard deviation, over 500 * 400 draws.
    assert abs((decoded - wanted).mean()) <= 5 * 0.5 / s / math.sqrt(500 * 400)


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("s", [1, 4, 7, 100])
@pytest.mark.parametrize("unit", [SMALLEST, 100 * SMALLEST, 2.0**-130])
def test_subnormal_norms_are_unbiased(norm: Norm, s: int, unit: float):
    v = (torch.arange(1, 65, dtype=torch.float64) % 5 * unit).float()
    decoded = draws(Quantize(norm=norm, levels=s), v, 300)
    errors = (decoded - v.double().numpy()).sum(axis=1)
    assert abs(errors.mean()) <= 5 * errors.std() / math.sqrt(300)


def test_a_huge_range_is_in_range():
    v = torch.tensor([LARGEST, 1.0, SMALLEST, -1e-30, 0.0, -LARGEST])
    for norm in get_args(Norm):
        decoded = draws(Quantize(norm=norm), v, 50)
        assert np.isfinite(decoded).all() and (np.abs(decoded) <= LARGEST).all()
        assert (decoded[:, 4] == 0).all() and (decoded * v.double().numpy() >= 0).all()


def test_terngrad_is_the_largest_magnitude_zero_or_its_negative():
    v = torch.from_numpy(np.random.default_rng(6).standard_normal((8, 9)).astype(np.float32))
    packet = encode(TernGrad(), v)
    largest = float(v.abs().max())
    assert set(packet.decode()["w"].unique().tolist()) == {-largest, 0.0, largest}
    assert packet.num_bits == 32 + 8 * math.ceil(72 / 5)


def test_terngrad_clips_at_standard_deviations():
    # 15 zeros and a 16: mean 1, deviation sqrt((15 + 225) / 16) = sqrt(15); two of them are sent with certainty.
    v = torch.zeros(16)
    v[3] = -16.0
    assert decode(TernGrad(clip=2.0), v)[3] == pytest.approx(-2 * math.sqrt(15))
    assert decode(TernGrad(), v)[3] == -16.0
    assert decode(TernGrad(clip=2.5), torch.full((4,), 0.5)).tolist() == [0.5] * 4


def test_qsgd_is_quantize_with_the_2_norm():
    v = torch.from_numpy(np.random.default_rng(7).standard_normal(2000).astype(np.float32))
    assert np.array_equal(decode(QSGD(), v), decode(Quantize(norm="2", levels=7, bucket=512), v))


@pytest.mark.parametrize("levels", [0, 32768])
def test_levels_out_of_range_are_refused(levels: int):
    with refused(names=[f"levels={levels}", "[1, 32767]"]):
        QSGD(levels=levels)
