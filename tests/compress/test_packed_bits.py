"""Packings bit by bit, and that any numbers come back."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.compress import packed_bits
from tests.small_cases import small_cases


def test_fixed_width_fills_bytes_from_the_lowest_bit():
    # 3 bits each, the first lowest: 1 + 2 * 8 + 3 * 64 = 209, and 5 in the next byte.
    assert packed_bits.pack(np.array([1, 2, 3, 5], np.uint8), 3).tolist() == [209, 0b1010]


def test_one_bit_is_a_little_endian_bitmap():
    codes = np.random.default_rng(0).integers(0, 2, 1001).astype(np.uint8)
    assert packed_bits.pack(codes, 1).tolist() == np.packbits(codes, bitorder="little").tolist()


def test_low_bytes_come_first_beyond_eight_bits():
    # 12 bits: the low bytes, then the upper halves in one byte.
    assert packed_bits.pack(np.array([0x123, 0xABC], np.uint16), 12).tolist() == [0x23, 0xBC, 0xA1]


@small_cases("width, count", itertools.product(range(1, 17), [0, 1, 7, 8, 9, 1001]))
def test_every_width_comes_back_in_the_fewest_bytes(width: int, count: int):
    codes = np.random.default_rng(width).integers(0, 1 << width, count).astype(np.uint16 if width > 8 else np.uint8)
    packed = packed_bits.pack(codes, width)
    assert packed.dtype == np.uint8 and packed.size == -(-count * width // 8)
    back = packed_bits.unpack(packed, width, count)
    assert back.dtype == codes.dtype and np.array_equal(back, codes)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16).flatmap(lambda width: st.tuples(st.just(width), st.lists(st.integers(0, 2**width - 1)))))
def test_any_codes_come_back(drawn: tuple[int, list[int]]):
    width, codes = drawn
    packed = packed_bits.pack(np.array(codes, np.uint16), width)
    assert packed_bits.unpack(packed, width, len(codes)).tolist() == codes
    if width <= 8:
        # The buffer is the number whose digits in base 2^width are the codes.
        number = sum(code << (width * place) for place, code in enumerate(codes))
        assert int.from_bytes(packed.tobytes(), "little") == number


def test_five_trits_a_byte_in_five_planes():
    # Two bytes: entries 0, 2, 4, 6 and 1, 3, 5 with weights 1, 3, 9, 27.
    digits = np.array([1, 2, 0, 1, 2, 2, 1], np.uint8)
    assert packed_bits.pack_trits(digits).tolist() == [1 + 0 * 3 + 2 * 9 + 1 * 27, 2 + 1 * 3 + 2 * 9]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2)))
def test_any_trits_come_back(digits: list[int]):
    packed = packed_bits.pack_trits(np.array(digits, np.uint8))
    assert packed.size == -(-len(digits) // 5) and (packed < 243).all()
    assert packed_bits.unpack_trits(packed, len(digits)).tolist() == digits


def test_every_byte_of_trits():
    packed = np.arange(243, dtype=np.uint8)
    assert packed_bits.pack_trits(packed_bits.unpack_trits(packed, 5 * 243)).tolist() == packed.tolist()


def test_gamma_codes_bit_by_bit():
    # 1, 2, 3, 9 = 1|, 01|0, 01|1, 0001|001: prefixes 1 01 01 0001, digits 0 1 001.
    prefixes, digits = packed_bits.encode_gamma(np.array([1, 2, 3, 9]))
    assert prefixes.tolist() == [0b10101000, 0b10000000]
    assert digits.tolist() == [0b01001000]
    assert packed_bits.decode_gamma(prefixes, digits).tolist() == [1, 2, 3, 9]


def test_nothing_in_gamma_codes():
    prefixes, digits = packed_bits.encode_gamma(np.empty(0, np.int64))
    assert (prefixes.size, digits.size, packed_bits.decode_gamma(prefixes, digits).size) == (0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 8), st.integers(1, 2**31))))
def test_any_numbers_come_back_at_the_length_of_their_gamma_codes(numbers: list[int]):
    prefixes, digits = packed_bits.encode_gamma(np.array(numbers, np.int64))
    assert packed_bits.decode_gamma(prefixes, digits).tolist() == numbers
    # floor(log2 n) zeros, a one, and floor(log2 n) digits.
    assert prefixes.size == -(-sum(n.bit_length() for n in numbers) // 8)
    assert digits.size == -(-sum(n.bit_length() - 1 for n in numbers) // 8)
