"""A sparsifier and a quantizer in a row: what arrives, its bits, and the constants that follow."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.base import Quantizer
from rayfl.compress.compose import Compose, ComposeCodec
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.natural import NaturalCompression
from rayfl.compress.quantize import QSGD, Quantize, TernGrad
from rayfl.compress.random import RandK
from rayfl.compress.sign import OneBit, ScaledSign
from rayfl.compress.sparse import Sparsifier, TopK
from rayfl.compress.threshold import Threshold
from rayfl.tree import Tree
from tests.refusals import refused

OUTERS = [
    TopK(keep_ratio=0.2),
    TopK(keep_ratio=0.2, scope="model"),
    RandK(keep_ratio=0.2),
    RandK(keep_ratio=0.2, scale=False, positions="coded", scope="model"),
    Threshold(threshold=0.4, relative=True),
    Threshold(threshold=1.5),
]
INNERS = [
    Dense(),
    Dense(dtype="fp16"),
    QSGD(),
    Quantize(coding="elias"),
    TernGrad(),
    NaturalCompression(),
    ScaledSign(),
    OneBit(),
]


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def tree() -> Tree:
    """Of `quiet` an absolute threshold keeps nothing, of `loud` everything."""
    normal = torch.from_numpy(rng(0).standard_normal((30, 40)).astype(np.float32))
    return {"w": normal, "quiet": torch.full((5,), 0.01), "loud": torch.full((2, 3), -9.0), "none": torch.zeros(0)}


def table(**values: Any) -> Compose:
    return Compose(**values)


@pytest.mark.parametrize("outer", OUTERS, ids=repr)
@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_what_was_kept_arrives_as_the_quantizer_sends_it(outer: Sparsifier, inner: Quantizer):
    x = tree()
    packet, _ = Compose(outer=outer, inner=inner).encode(x, {}, rng())
    # The same draws by hand: first those of the sparsifier, then those of the quantizer.
    generator = rng()
    sparse, _ = outer.encode(x, {}, generator)
    support, kept = sparse.support(), sparse.decode()
    alone, _ = inner.encode({name: kept[name][mask] for name, mask in support.items()}, {}, generator)
    decoded = packet.decode()
    for name, values in alone.decode().items():
        wanted = torch.zeros(x[name].shape)
        wanted[support[name]] = values
        assert torch.equal(decoded[name], wanted) and torch.equal(packet.support()[name], support[name])
    # The bits: those of the quantizer, and the positions as the sparsifier sends them, but for a byte where all are.
    where = sum(part.nbytes for name, part in sparse.parts.items() if not name.endswith(".values"))
    whole = [name for name, mask in support.items() if mask.numel() and mask.all()]
    everything = 0 if "seed" in sparse.parts else len(whole)
    assert packet.num_bits == alone.num_bits + 8 * (where + everything)


def test_bits_of_a_seed_and_terngrad():
    # 100 of 1000: a seed, a norm, and five digits a byte.
    packet, _ = Compose(outer=RandK(), inner=TernGrad()).encode({"w": torch.ones(1000)}, {}, rng())
    assert packet.num_bits == 64 + 32 + 8 * 20


def test_the_receiver_knows_no_more_than_the_shapes_of_the_tree():
    packet, _ = Compose(outer=Threshold(threshold=1.5), inner=QSGD()).encode(tree(), {}, rng())
    assert isinstance(packet.codec, ComposeCodec) and packet.codec.inner.shapes == ()


def test_omega_of_two_unbiased_ones():
    # (1 + 9)(1 + 1/8) - 1; and of 100 entries 10 are kept: sqrt(10) - 1 and (sqrt(10) - 1) / 2.
    assert Compose(outer=RandK(), inner=NaturalCompression()).omega(100) == pytest.approx(10.25, rel=1e-12)
    one_level = Quantize(norm="2", levels=1, bucket=0)
    assert Compose(outer=RandK(), inner=one_level).omega(100) == pytest.approx(10 * math.sqrt(10) - 1, rel=1e-12)
    assert Compose(outer=RandK(), inner=TernGrad()).omega(100) == pytest.approx(5 * (math.sqrt(10) + 1) - 1, rel=1e-12)
    for biased in (
        Compose(outer=TopK()),
        Compose(outer=RandK(scale=False)),
        Compose(outer=RandK(), inner=ScaledSign()),
    ):
        assert biased.omega(100) is None


def test_the_composed_omega_is_attained():
    # v = ones(8), two are kept as (4, 4), of norm 4 sqrt(2): with one level each arrives as that with probability
    # 1 / sqrt(2), else 0. E||C||^2 = 2 * 32 / sqrt(2) = 8 * (8 / 2) * sqrt(2), so omega = 4 sqrt(2) - 1 exactly.
    compressor = Compose(outer=RandK(keep_ratio=0.25), inner=Quantize(norm="2", levels=1, bucket=0))
    assert compressor.omega(8) == pytest.approx(4 * math.sqrt(2) - 1, rel=1e-12)
    x, generator = {"w": torch.ones(8)}, rng()
    squares = [float((compressor.encode(x, {}, generator)[0].decode()["w"] ** 2).sum()) for _ in range(4000)]
    assert np.mean(squares) == pytest.approx(8 * 4 * math.sqrt(2), abs=5 * float(np.std(squares)) / math.sqrt(4000))


def test_delta_of_two_contractions():
    # Top-k keeps 1/4 of ||v||^2 at least, and of its 10 entries the sign keeps 1/10 at least.
    compressor = Compose(outer=TopK(keep_ratio=0.25), inner=ScaledSign())
    assert compressor.delta(40) == pytest.approx(0.025, rel=1e-9)
    assert Compose(outer=TopK(keep_ratio=0.25), inner=Dense()).delta(40) == 0.25
    # By hand: (4, 2) is kept of (4, 2, 1, 1) and arrives as (3, 3): 1 + 1 is lost of it, and 1 + 1 dropped.
    x = {"w": torch.tensor([4.0, 2.0, 1.0, 1.0])}
    decoded = Compose(outer=TopK(keep_ratio=0.5), inner=ScaledSign()).encode(x, {}, rng())[0].decode()["w"]
    assert decoded.tolist() == [3.0, 3.0, 0.0, 0.0]


def test_delta_in_expectation():
    # Natural compression loses 1/8 of what is kept on average.
    assert Compose(outer=TopK(keep_ratio=0.25), inner=NaturalCompression()).expected_delta(40) == 0.25 * 7 / 8
    assert (
        Compose(outer=RandK(keep_ratio=0.25, scale=False), inner=NaturalCompression()).expected_delta(40)
        == 0.25 * 7 / 8
    )
    assert Compose(outer=TopK(keep_ratio=0.25), inner=NaturalCompression()).delta(40) is None
    # 400 entries of one level: omega = 19, so nothing follows.
    coarse = Quantize(norm="2", levels=1, bucket=0)
    assert Compose(outer=TopK(keep_ratio=0.1), inner=coarse).expected_delta(4000) is None
    scaled = Compose(outer=RandK(), inner=ScaledSign())
    assert (scaled.delta(40), scaled.expected_delta(40)) == (None, None)


def test_feedback_around_it_loses_nothing():
    compressor = ErrorFeedback(inner=Compose(outer=TopK(), inner=ScaledSign()))
    x = {"w": tree()["w"]}
    packet, memory = compressor.encode(x, compressor.init(x), rng())
    torch.testing.assert_close(packet.decode()["w"] + memory["w"], x["w"], rtol=0, atol=1e-6)


def test_tables_name_both_and_are_written_back():
    compressor = table(outer={"name": "randk", "keep_ratio": 0.2}, inner={"name": "qsgd", "levels": 3})
    assert compressor == Compose(outer=RandK(keep_ratio=0.2), inner=QSGD(levels=3))
    assert table(**compressor.model_dump()) == compressor
    assert compressor.model_dump()["outer"]["name"] == "randk"


def test_a_bare_name_stands_for_a_table_with_that_name():
    assert table(outer="randk", inner="natural") == Compose(outer=RandK(), inner=NaturalCompression())


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"outer": {"name": "qsgd"}}, ["outer: 'qsgd'", "sparsifier", "randk, threshold, topk"]),
        ({"inner": {"name": "topk"}}, ["inner: 'topk'", "quantizer", "dense, eden, natural, onebit, qsgd"]),
        ({"inner": {"name": "feedback"}}, ["inner: 'feedback'", "quantizer"]),
        ({"inner": {"name": "compose"}}, ["inner: 'compose'", "quantizer"]),
        ({"outer": "rankd"}, ["rankd", "randk"]),
        ({"inner": 3}, ["inner=3", "a name", "table"]),
        ({"outer": {"name": "topk", "keep_ratio": 2.0}}, ["outer.keep_ratio=2.0", "(0, 1]"]),
        ({"outer": {"name": "topk", "values": "fp16"}}, ["outer.values='fp16'", "compose", "inner"]),
    ],
)
def test_mistakes_are_one_sentence(values: dict[str, Any], names: list[str]):
    with refused(names=names):
        table(**values)
