"""Golomb-Rice codes against a coder that writes one gap after another, and against the geometric distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.compress.golomb import decode_golomb, encode_golomb, low_bits


def expected_bits(keep_ratio: float) -> float:
    """Bits a position where every entry is kept with probability p: b* + 1 / (1 - (1 - p)^(2^b*))."""
    b = low_bits(keep_ratio)
    return b - 1 / math.expm1(2.0**b * math.log1p(-keep_ratio))


def textbook_bits(positions: np.ndarray, b: int) -> int:
    """Length of the code of each gap by itself: the quotient in unary with its terminator, and b bits."""
    text, last = "", -1
    for position in positions.tolist():
        gap = position - last - 1
        text += "0" * (gap // 2**b) + "1" + (format(gap % 2**b, f"0{b}b") if b else "")
        last = position
    return len(text)


@pytest.mark.parametrize(
    ("positions", "b", "bits"),
    [
        # Gaps 0, 4, 0: low bits 0 0 0, then 1, 001, 1.
        ([0, 5, 6], 1, "000" + "1" + "001" + "1"),
        # Gaps 2, 3, 7: high bits 1 1 1, low bits 0 1 1, then 1, 1, 01.
        ([2, 6, 14], 2, "111" + "011" + "1" + "1" + "01"),
        # Gaps 1, 2 in unary alone.
        ([1, 4], 0, "01" + "001"),
    ],
)
def test_the_buffer_by_hand(positions: list[int], b: int, bits: str):
    buffer = encode_golomb(np.array(positions), 16, b)
    assert "".join(format(byte, "08b") for byte in buffer) == bits.ljust(8 * len(buffer), "0")
    assert len(buffer) == math.ceil(len(bits) / 8)


@given(st.data(), st.integers(1, 3000), st.integers(0, 12))
def test_round_trip_at_the_textbook_length(data: st.DataObject, size: int, b: int):
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.int64)
    buffer = encode_golomb(positions, size, b)
    assert buffer.dtype == np.uint8
    np.testing.assert_array_equal(decode_golomb(buffer, size, positions.size, b), positions)
    if positions.size not in (0, size):
        assert buffer.size == math.ceil(textbook_bits(positions, b) / 8)


def test_no_position_and_every_position_need_no_bytes():
    for positions in (np.arange(0), np.arange(9)):
        buffer = encode_golomb(positions, 9, 2)
        assert buffer.size == 0
        np.testing.assert_array_equal(decode_golomb(buffer, 9, positions.size, 2), positions)


@pytest.mark.parametrize("keep_ratio", [1e-6, 1 / 400, 0.01, 0.05, 0.1, 0.25, 0.38, 0.39, 0.5, 0.9, 0.999])
def test_b_gives_the_shortest_code(keep_ratio: float):
    # A gap is geometric, so its quotient by 2^b is too: 1 / (1 - (1 - p)^(2^b)) bits of unary code on average.
    lengths = [b - 1 / math.expm1(2**b * math.log1p(-keep_ratio)) for b in range(25)]
    assert low_bits(keep_ratio) == int(np.argmin(lengths))
    assert expected_bits(keep_ratio) == pytest.approx(min(lengths), rel=1e-12)


def test_b_by_hand():
    # ln(phi - 1) = -0.4812. p = 0.1: 0.4812 / 0.1054 = 4.57, log2 is 2.19. p = 1/400: 0.4812 / 0.002503 = 192.2, 7.59.
    # p = 0.3: 0.4812 / 0.3567 = 1.35, 0.43. p = 0.4: 0.4812 / 0.5108 = 0.94, -0.09. p = 0.7: 0.4812 / 1.204, -1.3.
    assert [low_bits(p) for p in (0.1, 1 / 400, 0.3, 0.4, 0.7, 1.0)] == [3, 8, 1, 0, 0, 0]
    assert expected_bits(0.1) == pytest.approx(3 + 1 / (1 - 0.9**8))
    # At the smallest ratios the formula asks for more bits than any gap below 2^31 has.
    assert low_bits(1e-300) == 31


@pytest.mark.parametrize("keep_ratio", [1 / 400, 0.1, 0.5])
def test_random_positions_cost_what_is_expected(keep_ratio: float):
    size, b = 1_000_000, low_bits(keep_ratio)
    positions = np.flatnonzero(np.random.default_rng(3).random(size) < keep_ratio)
    # A quotient is geometric with ratio r, whose standard deviation is sqrt(r) / (1 - r); five standard errors.
    r = (1 - keep_ratio) ** (2**b)
    slack = 5 * math.sqrt(r) / (1 - r) / math.sqrt(positions.size) + 8 / positions.size
    bits = 8 * encode_golomb(positions, size, b).size / positions.size
    assert bits == pytest.approx(expected_bits(keep_ratio), abs=slack)


def test_gaps_of_almost_two_to_the_31():
    positions = np.array([0, 2**31 - 2])
    for b in (20, 31):
        buffer = encode_golomb(positions, 2**31, b)
        np.testing.assert_array_equal(decode_golomb(buffer, 2**31, 2, b), positions)
