"""The codes of positions, byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress.positions import (
    BITMAP,
    GAPS,
    GOLOMB,
    INT32,
    PACKED,
    decode_counted,
    decode_positions,
    encode_counted,
    encode_positions,
)
from tests.refusals import refused


def encoded(positions: list[int], size: int) -> list[int]:
    buffer = encode_positions(np.array(positions, np.int64), size)
    assert buffer.dtype == np.uint8
    assert decode_positions(buffer, size, len(positions)).tolist() == positions
    return buffer.tolist()


def counted(positions: list[int], size: int) -> list[int]:
    buffer = encode_counted(np.array(positions, np.int64), size)
    assert decode_counted(buffer, size).tolist() == positions
    return buffer.tolist()


def test_gaps_count_what_is_skipped():
    # 3 skipped, none, then 295 = 255 + 40: four bytes, against 12 as int32 and 375 as a bitmap.
    assert encoded([3, 4, 300], 3000) == [3, 0, 255, 40, GAPS]


def test_a_gap_of_255_needs_an_escape():
    assert counted([254], 10_000) == [254, GAPS]
    assert counted([255], 10_000) == [255, 0, GAPS]
    assert counted([509], 10_000) == [255, 254, GAPS]
    assert counted([510], 10_000) == [255, 255, 0, GAPS]


def test_bitmap_above_one_position_in_eight():
    assert encoded([0, 2, 4, 6, 8, 10, 12, 14, 16], 17) == [0b10101010, 0b10101010, 0b10000000, BITMAP]


def test_bitmap_where_escapes_cost_more():
    # 999 positions take 999 bytes as gaps plus 7001 // 255 = 27 escapes; the bitmap takes 1000.
    assert len(encoded(list(range(7001, 8000)), 8000)) == 1000 + 1


def test_packed_for_few_far_positions():
    # 10^6 = 0xF4240 in 21 bits, highest first; as a gap it would take 3922 bytes, as int32 four.
    assert encoded([1_000_000], 2_000_000) == [0b01111010, 0b00010010, 0b00000000, PACKED]
    # Where the receiver does not know the number of positions.
    assert counted([1_000_000], 2_000_000) == [0x40, 0x42, 0x0F, 0x00, INT32]


def test_golomb_for_one_position_in_a_thousand():
    # Positions 500, 1500, ... of 10^6: gaps of 999 but for the first. b = 1 + floor(log2(ln(phi - 1) / ln(0.999))) = 9,
    # so ten bits and 999 >> 9 = 1 more: 11 bits a position, 10 for the first (500 >> 9 = 0). Packed would take 20 bits.
    positions = list(range(500, 1_000_000, 1000))
    found = encoded(positions, 1_000_000)
    assert found[-1] == GOLOMB and len(found) == -(-(11 * 1000 - 1) // 8) + 1


@pytest.mark.parametrize("density", [0.0025, 0.002, 0.0005, 1e-5])
@pytest.mark.parametrize("size", [400, 1000, 70_000, 1_000_000])
def test_below_a_quarter_percent_no_code_of_the_table_is_cheaper(density: float, size: int):
    # Three codes: int32, packed indices, or a bitmap; and a byte that names the code.
    draw = np.random.default_rng(size)
    count = max(1, int(density * size))
    positions = np.sort(draw.choice(size, count, replace=False))
    buffer = encode_positions(positions, size)
    np.testing.assert_array_equal(decode_positions(buffer, size, count), positions)
    packed = -(-count * (size - 1).bit_length() // 8)
    assert buffer.size <= min(4 * count, packed, -(-size // 8)) + 1


def test_none_and_all_cost_nothing():
    assert encoded([], 1000) == []
    assert encoded([], 0) == []
    assert encoded([0, 1, 2], 3) == []


def test_int32_positions_give_the_same_bytes():
    positions = np.array([3, 4, 300])
    assert encode_positions(positions.astype(np.int32), 3000).tolist() == encode_positions(positions, 3000).tolist()


def test_too_large_a_tensor_is_refused():
    with refused(names=["2147483649 entries", "int32", "2147483648"]):
        encode_positions(np.array([0]), 2**31 + 1)


def test_a_tenth_of_a_million_costs_a_byte_each():
    assert len(encoded(list(range(0, 1_000_000, 10)), 1_000_000)) == 100_000 + 1


@st.composite
def sets_of_positions(draw: st.DrawFn) -> tuple[list[int], int]:
    """Steps up to 700 make escapes, steps of 1 make bitmaps."""
    steps = draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 700)), min_size=1, max_size=60))
    positions = (np.cumsum(steps) - 1).tolist()
    return positions, positions[-1] + draw(st.integers(2, 5000))


@settings(max_examples=200, deadline=None)
@given(sets_of_positions())
def test_any_set_comes_back_from_the_smallest_code(drawn: tuple[list[int], int]):
    positions, size = drawn
    gap_bytes = sum((after - before - 1) // 255 + 1 for before, after in zip([-1, *positions], positions, strict=False))
    smallest = min(gap_bytes, (size + 7) // 8, 4 * len(positions))
    found = len(encoded(positions, size))
    if size < 400 * len(positions):
        assert found == smallest + 1
    else:
        packed = (len(positions) * (size - 1).bit_length() + 7) // 8
        assert found <= min(smallest, packed) + 1


@pytest.mark.parametrize(
    "positions", [[], [0], [2999], [0, 256, 512], list(range(0, 3000, 2)), list(range(0, 3000, 10)), list(range(3000))]
)
def test_counted_positions_tell_how_many_they_are(positions: list[int]):
    given = np.array(positions, np.int64)
    buffer = encode_counted(given, 3000)
    assert decode_counted(buffer, 3000).tolist() == positions
    known, all_of_them = encode_positions(given, 3000).nbytes, len(positions) == 3000
    # Packed and Golomb's code, which few positions may have, need their number.
    assert buffer.nbytes == known + all_of_them or (400 * len(positions) <= 3000 and buffer.nbytes > known)
