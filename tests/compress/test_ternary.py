"""Sparse ternary compression against its definition in numpy, and its buffers bit by bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.ternary import Ternary
from rayfl.tree import Tree
from tests.compress.ternary_paper import LOW_BITS, num_bits, stc
from tests.refusals import refused

RNG = np.random.default_rng(0)


def tree_of(*shapes: tuple[int, ...], seed: int = 1) -> Tree:
    draw = np.random.default_rng(seed)
    return {f"t{i}": torch.from_numpy(draw.standard_normal(s).astype(np.float32)) for i, s in enumerate(shapes)}


def encode(x: Tree, **settings: Any) -> Packet:
    return Ternary(**settings).encode(x, {}, RNG)[0]


def flat(x: Tree) -> np.ndarray:
    return np.concatenate([tensor.numpy().ravel() for tensor in x.values()])


@pytest.mark.parametrize("keep_ratio", LOW_BITS)
def test_equals_the_definition_tensor_by_tensor(keep_ratio: float):
    x = tree_of((40, 30), (17,), (3, 5, 2, 2), ())
    packet = encode(x, keep_ratio=keep_ratio)
    decoded, support = packet.decode(), packet.support()
    for name, tensor in x.items():
        expected = stc(tensor.numpy().ravel(), keep_ratio)
        assert decoded[name].numpy().ravel().tolist() == expected.tolist()
        assert (support[name].numpy().ravel() == (expected != 0)).all()
    assert packet.num_bits == sum(
        num_bits(stc(tensor.numpy().ravel(), keep_ratio), keep_ratio) for tensor in x.values()
    )


@pytest.mark.parametrize("keep_ratio", LOW_BITS)
def test_equals_the_definition_on_the_whole_model(keep_ratio: float):
    x = tree_of((40, 30), (17,), (0, 3), (3, 5, 2, 2), ())
    packet = encode(x, keep_ratio=keep_ratio, scope="model")
    assert flat(packet.decode()).tolist() == stc(flat(x), keep_ratio).tolist()
    assert packet.num_bits == num_bits(stc(flat(x), keep_ratio), keep_ratio)
    total = tree_of((40, 30), (17,), (0, 3), (3, 5, 2, 2), (), seed=2)
    before = flat(total).copy()
    packet.add_to(total, 0.5)
    np.testing.assert_allclose(flat(total), before + 0.5 * stc(flat(x), keep_ratio), rtol=1e-6)


def test_the_buffers_by_hand():
    # k = ceil(0.4 * 7) = 3 of largest magnitude: -5, 4, -3 at 1, 4, 5; mu = 4; b* = 0.
    # Signs 1 0 1; gaps 1, 2, 0 in unary: 01 001 1.
    packet = encode({"w": torch.tensor([1.0, -5.0, 0.5, 2.0, 4.0, -3.0, 0.0])}, keep_ratio=0.4)
    assert packet.decode()["w"].tolist() == [0.0, -4.0, 0.0, 0.0, 4.0, -4.0, 0.0]
    parts = {name: part.tolist() for name, part in packet.parts.items()}
    assert parts == {"w.mean": [4.0], "w.signs": [0b10100000], "w.positions": [0b01001100]}
    assert packet.num_bits == 32 + 8 + 8


def test_ties_go_to_the_lowest_index():
    assert encode({"w": torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0])}, keep_ratio=0.4).decode()["w"].tolist() == [
        0.0, -2.0, 2.0, 0.0, 0.0,
    ]  # fmt: skip


def test_everything_kept_needs_no_positions():
    v = tree_of((30, 11))
    assert encode(v, keep_ratio=1.0).num_bits == 32 + 8 * math.ceil(330 / 8)


def test_zeros_among_the_k_stay_zero_and_count_in_the_mean():
    # k = 4, of which two are zeros: mu = (3 + 1) / 4; the count of nonzeros costs 32 bits.
    v = torch.tensor([0.0, 3.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    packet = encode({"w": v}, keep_ratio=0.4)
    assert packet.decode()["w"].tolist() == [0.0, 1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Gaps 1 and 2 at b* = 0: 01 001.
    assert packet.num_bits == 32 + 32 + 8 + 8
    assert packet.support()["w"].nonzero().ravel().tolist() == [1, 4]


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("keep_ratio", [0.1, 1.0])
def test_zero_gives_zeros(scope: str, keep_ratio: float):
    x = {"a": torch.zeros(7, 3), "b": torch.zeros(2)}
    packet = encode(x, scope=scope, keep_ratio=keep_ratio)
    assert not flat(packet.decode()).any()
    assert packet.num_bits == (64 if scope == "model" else 128)


@pytest.mark.parametrize("keep_ratio", LOW_BITS)
def test_the_lost_part_is_known_exactly(keep_ratio: float):
    # ||C(v) - v||^2 = ||v||^2 - k mu^2, but for the rounding of mu.
    v = tree_of((50, 40))
    decoded = encode(v, keep_ratio=keep_ratio).decode()["t0"].double()
    k = max(1, math.ceil(keep_ratio * 2000 - 1e-9))
    squared, lost = float((v["t0"].double() ** 2).sum()), float(((decoded - v["t0"]) ** 2).sum())
    mu = np.sort(np.abs(v["t0"].double().numpy().ravel()))[-k:].mean()
    assert lost == pytest.approx(squared - k * mu**2, rel=1e-9)


def test_the_two_worst_cases_attain_delta():
    for n, keep_ratio in ((100, 0.05), (100, 0.4)):
        compressor, k = Ternary(keep_ratio=keep_ratio, scope="model"), round(keep_ratio * n)
        equal, one = torch.full((n,), -0.5), torch.full((n,), 1e-6)
        one[3] = 1.0
        kept = []
        for v in (equal, one):
            decoded = compressor.encode({"w": v}, {}, RNG)[0].decode()["w"].double()
            kept.append(1 - float(((decoded - v) ** 2).sum() / (v.double() ** 2).sum()))
        assert kept == pytest.approx([k / n, 1 / k], rel=1e-4)
        assert compressor.delta(n) == pytest.approx(min(k / n, 1 / k), rel=1e-9)


def test_delta_holds_over_single_tensors():
    # Tensors of 40 and 60 entries with k = 4 and 6: the smaller k alone would promise 1 / 4.
    v = {"small": torch.full((40,), 1e-9), "large": torch.full((60,), 1e-9)}
    v["large"][0] = 1.0
    decoded = encode(v, keep_ratio=0.1).decode()
    kept = 1 - float(((decoded["large"].double() - v["large"]) ** 2).sum())
    delta = Ternary(keep_ratio=0.1).delta(100)
    assert delta is not None
    assert kept == pytest.approx(1 / 6, rel=1e-6)
    assert delta == pytest.approx(1 / 10, rel=1e-6)
    assert delta <= kept


def test_feedback_sends_everything_in_the_end():
    # The sum of what was sent and the memory is the sum of what was given.
    compressor, x = ErrorFeedback(inner=Ternary(keep_ratio=0.1)), tree_of((20, 10))
    memory, sent = compressor.init(x), torch.zeros(20, 10)
    for step in range(1, 31):
        packet, memory = compressor.encode(x, memory, RNG)
        sent += packet.decode()["t0"]
        torch.testing.assert_close(sent + memory["t0"], step * x["t0"], rtol=0, atol=1e-4)
    # Without the memory it would be the same 20 entries every time.
    assert int((sent != 0).sum()) > 100


@pytest.mark.parametrize("keep_ratio", [0.0, -0.1, 1.01])
def test_ratios_outside_are_refused(keep_ratio: float):
    with refused(names=[f"keep_ratio={keep_ratio}", "(0, 1]"]):
        Ternary(keep_ratio=keep_ratio)
