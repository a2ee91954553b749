"""A lossless stage gives back every byte of every compressor's packet."""

import zlib

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.countsketch import CountSketch
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.lossless import Lossless, squeezed
from rayfl.compress.powersgd import PowerSGD
from rayfl.compress.quantize import QSGD
from rayfl.determinism.platform import describe
from rayfl.tree import Tree
from tests.contracts.every_compressor import VARIANTS, assert_same, encode, label, ordinary
from tests.refusals import refused
from tests.small_cases import small_cases

INNER = [one for one in VARIANTS if "ossless" not in label(one)]


def zeros() -> Tree:
    return {"w": torch.zeros(4000), "m": torch.zeros(30, 40)}


@pytest.mark.parametrize("inner", INNER, ids=label)
def test_every_byte_comes_back(inner: Compressor):
    around = Lossless(inner=inner)
    for x in (ordinary(), zeros()):
        (plain, memory), (found, other) = encode(inner, x), encode(around, x)
        # Any codec: of Lossless.
        raw = found.codec.raw(found.parts)  # type: ignore[attr-defined]
        assert {name: (part.dtype, part.tobytes()) for name, part in raw.items()} == {
            name: (part.dtype, part.tobytes()) for name, part in plain.parts.items()
        }
        assert found.num_bits <= plain.num_bits + 8 * len(plain.parts)
        assert_same(found.decode(), plain.decode())
        assert_same(other, memory)
    assert_same(around.init(ordinary()), inner.init(ordinary()))


@small_cases("inner", INNER)
def test_its_constants_are_those_of_the_inner_compressor(inner: Compressor):
    around = Lossless(inner=inner)
    for n in (1, 100):
        assert (around.omega(n), around.delta(n)) == (inner.omega(n), inner.delta(n))
        assert around.expected_delta(n) == inner.expected_delta(n)


def test_what_repeats_becomes_small_and_noise_does_not_grow():
    assert encode(Lossless(inner=Dense()), zeros())[0].num_bits < 32 * 5200 / 100
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    assert squeezed(noise).size == 5001
    levels = {"w": torch.from_numpy(np.random.default_rng(1).standard_normal(20_000).astype(np.float32))}
    plain, around = (encode(one, levels)[0].num_bits for one in (QSGD(), Lossless(inner=QSGD())))
    # Most levels are near 0: the entropy of the 4 bits is below 2.
    assert around < 0.6 * plain


def test_numbers_are_transposed_first():
    smooth = np.linspace(1, 2, 4000, dtype=np.float32)
    assert squeezed(smooth).size < 0.8 * len(zlib.compress(smooth.tobytes(), 6))


def test_a_buffer_that_decodes_to_too_much_is_refused():
    packet, _ = encode(Lossless(inner=Dense()), {"w": torch.ones(100)})
    # 64 bytes and 4 times the 400 of the tensor.
    for size, fits in ((1664, True), (1665, False), (50_000_000, False)):
        parts = {"w": squeezed(np.zeros(size, np.uint8))}
        bomb = Packet(parts, packet.codec)
        if fits:
            assert bomb.codec.raw(parts)["w"].size == size  # type: ignore[attr-defined]
        else:
            with refused(names=["'w'", 1664]):
                bomb.decode()


def test_a_sketch_larger_than_the_tree_passes():
    inner = CountSketch(columns=1000)
    (plain, _), (packet, _) = (encode(one, ordinary()) for one in (inner, Lossless(inner=inner)))
    assert_same(packet.decode(), plain.decode())


def test_memories_pass_through():
    x = {"w": torch.randn(30, 20)}
    inside, outside = ErrorFeedback(inner=Lossless(inner=PowerSGD())), Lossless(inner=ErrorFeedback(inner=PowerSGD()))
    for compressor in (inside, outside):
        assert set(compressor.init(x)) == {"w", "w.factor"}
        assert set(encode(compressor, x)[1]) == {"w", "w.factor"}


def test_an_error_is_not_counted_twice_through_it():
    with refused(names=["feedback", "lossless", "twice"]):
        ErrorFeedback(inner=Lossless(inner=ErrorFeedback())).init({"w": torch.zeros(3)})


def test_the_platform_names_the_build_of_zlib():
    assert describe(1)["zlib"] == zlib.ZLIB_RUNTIME_VERSION
