"""The three codes of positions, byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress.positions import (
    BITMAP,
    GAPS,
    INT32,
    decode_counted,
    decode_positions,
    encode_counted,
    encode_positions,
    positions_of,
)


def encoded(positions: list[int], size: int) -> list[int]:
    buffer = encode_positions(np.array(positions, np.int64), size)
    assert buffer.dtype == np.uint8
    assert decode_positions(buffer, size, len(positions)).tolist() == positions
    return buffer.tolist()


def test_gaps_count_what_is_skipped():
    # 3 skipped, none, then 295 = 255 + 40: four bytes, against 12 as int32 and 375 as a bitmap.
    assert encoded([3, 4, 300], 3000) == [3, 0, 255, 40, GAPS]


def test_a_gap_of_255_needs_an_escape():
    assert encoded([254], 10_000) == [254, GAPS]
    assert encoded([255], 10_000) == [255, 0, GAPS]
    assert encoded([509], 10_000) == [255, 254, GAPS]
    assert encoded([510], 10_000) == [255, 255, 0, GAPS]


def test_bitmap_above_one_position_in_eight():
    assert encoded([0, 2, 4, 6, 8, 10, 12, 14, 16], 17) == [0b10101010, 0b10101010, 0b10000000, BITMAP]


def test_bitmap_where_escapes_cost_more():
    # 999 positions take 999 bytes as gaps plus 7001 // 255 = 27 escapes; the bitmap takes 1000.
    assert len(encoded(list(range(7001, 8000)), 8000)) == 1000 + 1


def test_int32_for_few_far_positions():
    # 10^6 = 0x0F4240; as a gap it would take 3922 bytes.
    assert encoded([1_000_000], 2_000_000) == [0x40, 0x42, 0x0F, 0x00, INT32]


def test_none_and_all_cost_nothing():
    assert encoded([], 1000) == []
    assert encoded([], 0) == []
    assert encoded([0, 1, 2], 3) == []


def test_int32_positions_give_the_same_bytes():
    positions = np.array([3, 4, 300])
    assert encode_positions(positions.astype(np.int32), 3000).tolist() == encode_positions(positions, 3000).tolist()


def test_too_large_a_tensor_is_refused():
    with pytest.raises(ValueError, match="too large for int32 positions"):
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
    assert len(encoded(positions, size)) == smallest + 1


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.01, 0.09, 0.11, 0.7, 1.0])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000, 1003, 100_000])
def test_positions_of_a_mask(size: int, density: float):
    mask = np.random.default_rng(size).random(size) < density
    assert positions_of(mask).tolist() == [i for i, kept in enumerate(mask.tolist()) if kept]
    shifted = np.concatenate([[True], mask])[1:]  # in memory that is not aligned
    assert positions_of(shifted).tolist() == positions_of(mask).tolist()


@pytest.mark.parametrize(
    "positions", [[], [0], [2999], [0, 256, 512], list(range(0, 3000, 2)), list(range(0, 3000, 10)), list(range(3000))]
)
def test_counted_positions_tell_how_many_they_are(positions: list[int]):
    given = np.array(positions, np.int64)
    buffer = encode_counted(given, 3000)
    assert decode_counted(buffer, 3000).tolist() == positions
    all_of_them = len(positions) == 3000
    assert buffer.nbytes == encode_positions(given, 3000).nbytes + all_of_them
