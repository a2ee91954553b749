"""Top-k against the definition, and sparse packets at chosen positions."""

import numpy as np
import pytest
import torch

from rayfl.compress.sparse import TopK, kept_entries, sparse_packet, top_k_positions, top_k_support
from rayfl.compress.values import ValueType
from tests.refusals import refused

RNG = np.random.default_rng(0)


def by_definition(x: np.ndarray, k: int) -> list[int]:
    """A stable sort of -|x| puts the lowest index first among equals."""
    return sorted(np.argsort(-np.abs(x), kind="stable")[:k].tolist())


def test_topk_keeps_the_two_largest():
    packet, _ = TopK(keep_ratio=0.5).encode({"w": torch.tensor([3.0, -4.0, 1.0, 0.0])}, {}, RNG)
    assert packet.decode()["w"].tolist() == [3.0, -4.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("num_entries", "keep_ratio", "kept"),
    [(10, 0.3, 3), (10, 1 - 0.7, 3), (11, 0.1, 2), (1, 0.001, 1), (7, 1.0, 7), (0, 0.5, 0), (1000, 0.1, 100)],
)
def test_k_from_a_ratio(num_entries: int, keep_ratio: float, kept: int):
    assert kept_entries(num_entries, keep_ratio) == kept


def test_ties_go_to_the_lowest_index():
    assert top_k_positions(np.array([1, -2, 2, 2, -1], np.float32), 2).tolist() == [1, 2]
    assert top_k_positions(np.array([1, -2, 2, 2, -1], np.float32), 4).tolist() == [0, 1, 2, 3]


def test_zeros_fill_up_to_k():
    x = torch.tensor([0.0, -0.0, 5.0, 0.0])
    packet, _ = TopK(keep_ratio=0.75).encode({"w": x}, {}, RNG)
    assert packet.support()["w"].tolist() == [True, True, True, False]


@pytest.mark.parametrize("k", [1, 17, 3000, 30_000, 200_000, 299_999, 300_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "sparse", "growing"])
def test_large_tensors_by_definition(kind: str, k: int):
    # 300,000 entries are enough for the threshold to be guessed from a sample of every fourth.
    x = {
        "normal": RNG.standard_normal(300_000),
        "few values": RNG.integers(-3, 4, 300_000),
        "sparse": RNG.standard_normal(300_000) * (RNG.random(300_000) < 0.01),
        "growing": np.arange(300_000),
    }[kind].astype(np.float32)
    assert top_k_positions(x, k).tolist() == by_definition(x, k)


def test_a_sample_that_misleads_costs_time_and_not_exactness():
    # Every fourth entry, just those sampled, is large: they are 75,000, and 150,000 are wanted.
    x = RNG.random(300_000).astype(np.float32)
    x[::4] += 10
    assert top_k_positions(x, 150_000).tolist() == by_definition(x, 150_000)


def test_model_scope_ranks_all_tensors_together():
    x = {"a": torch.tensor([1.0, 5.0]), "none": torch.zeros(0), "b": torch.tensor([[4.0], [3.0]])}
    support = top_k_support(x, 0.5, "model")
    assert {name: mask.flatten().tolist() for name, mask in support.items()} == {
        "a": [False, True],
        "none": [],
        "b": [True, False],
    }
    packet, _ = TopK(keep_ratio=0.5, scope="model").encode(x, {}, RNG)
    assert packet.decode()["b"].tolist() == [[4.0], [0.0]]


def test_model_scope_breaks_ties_in_the_order_of_the_tree():
    support = top_k_support({"b": torch.tensor([2.0, 1.0]), "a": torch.tensor([2.0, 2.0])}, 0.5, "model")
    assert (support["b"].tolist(), support["a"].tolist()) == ([True, False], [True, False])


def test_a_tensor_may_get_nothing_in_model_scope():
    packet, _ = TopK(keep_ratio=0.5, scope="model").encode({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, {}, RNG)
    assert packet.decode()["a"].tolist() == [0, 0, 0]
    assert packet.num_bits == 3 * 32  # all of b, none of a: no byte for positions


def test_the_support_is_what_topk_sends():
    x = {"w": torch.from_numpy(RNG.standard_normal((30, 20)).astype(np.float32)), "b": torch.ones(20)}
    packet, _ = TopK(keep_ratio=0.05).encode(x, {}, RNG)
    support = top_k_support(x, 0.05)
    assert all(torch.equal(support[name], mask) for name, mask in packet.support().items())
    assert {name: int(mask.sum()) for name, mask in support.items()} == {"w": 30, "b": 1}


@pytest.mark.parametrize(("values", "value_bits"), [("fp32", 32), ("fp16", 16), ("bf16", 16)])
def test_bits_are_values_plus_positions(values: ValueType, value_bits: int):
    # 100 of 1000, every tenth: a byte a position, and one that names the code.
    x = torch.zeros(1000)
    x[::10] = 1.0
    packet, _ = TopK(keep_ratio=0.1, values=values).encode({"w": x}, {}, RNG)
    assert packet.num_bits == 100 * value_bits + 8 * (100 + 1)


def test_never_dearer_than_a_bitmap():
    x = {"w": torch.from_numpy(RNG.standard_normal(5000).astype(np.float32))}
    for ratio in (0.001, 0.01, 0.1, 0.3, 0.9):
        packet, _ = TopK(keep_ratio=ratio).encode(x, {}, RNG)
        assert packet.num_bits <= 32 * kept_entries(5000, ratio) + 5000 + 8


def test_values_are_rounded_to_16_bits():
    packet, _ = TopK(keep_ratio=0.5, values="fp16").encode({"w": torch.tensor([1 + 2**-11, 0.5])}, {}, RNG)
    assert packet.decode()["w"].tolist() == [1.0, 0.0]
    with refused(names=["'w'", "70000", "fp16", "bf16"]):
        TopK(keep_ratio=0.5, values="fp16").encode({"w": torch.tensor([7e4, 0.5])}, {}, RNG)


def test_equal_entries_are_the_worst_case_of_the_constant():
    # k/n = 2/8 is kept, so 6/8 of the norm is lost.
    x = {"w": torch.ones(8)}
    compressor = TopK(keep_ratio=0.25)
    lost = x["w"] - compressor.encode(x, {}, RNG)[0].decode()["w"]
    delta = compressor.delta(8)
    assert float(lost @ lost) / 8 == 0.75 and delta == pytest.approx(0.25, abs=2e-9)


def test_the_constant_of_one_tensor_is_not_that_of_the_whole():
    # 10 + 1 equal entries: 1 of 10 and 1 of 1 are kept. The worst v has its mass in the first tensor: 9/10 is lost,
    # although 2 of 11 entries are kept.
    delta = TopK(keep_ratio=0.1).delta(11)
    assert delta is not None and delta <= 0.1
    assert TopK(keep_ratio=0.1, scope="model").delta(11) == 2 / 11


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range_is_one_sentence(ratio: float):
    allowed = ["must be a number"] if ratio != ratio else ["(0, 1]"]
    with refused(names=[f"keep_ratio={ratio}", *allowed]):
        TopK(keep_ratio=ratio)


def test_zeros_inside_a_support_are_sent():
    values = {"w": torch.tensor([[0.0, 7.0], [8.0, 9.0]])}
    support = {"w": torch.tensor([[True, False], [True, False]])}
    packet = sparse_packet(values, support)
    assert packet.parts["w.values"].tolist() == [0.0, 8.0]
    assert torch.equal(packet.support()["w"], support["w"])
    assert packet.decode()["w"].tolist() == [[0.0, 0.0], [8.0, 0.0]]


def test_full_and_empty_supports():
    values = {"w": torch.tensor([1.0, 2.0])}
    full = sparse_packet(values, {"w": torch.tensor([True, True])})
    empty = sparse_packet(values, {"w": torch.tensor([False, False])})
    assert (full.num_bits, full.decode()["w"].tolist()) == (64, [1.0, 2.0])
    assert (empty.num_bits, empty.decode()["w"].tolist()) == (0, [0.0, 0.0])


def test_a_support_that_does_not_fit_is_refused():
    values = {"w": torch.ones(2)}
    with refused(names=["'w'", "missing", "bool", "(2,)"]):
        sparse_packet(values, {})
    with refused(names=["'w'", "torch.float32", "(2,)", "bool"]):
        sparse_packet(values, {"w": torch.ones(2)})
    with refused(names=["'w'", "torch.bool", "(3,)", "(2,)"]):
        sparse_packet(values, {"w": torch.ones(3, dtype=torch.bool)})


def test_add_to_touches_the_sent_entries_only():
    packet = sparse_packet({"w": torch.tensor([[4.0, 5.0], [6.0, 7.0]])}, {"w": torch.eye(2, dtype=torch.bool)})
    total = {"w": torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]])}
    packet.add_to(total, 0.5)
    assert total["w"].diagonal().tolist() == [3.0, 4.5]
    assert total["w"][0, 1].isnan() and total["w"][1, 0].isnan()


def test_packets_own_their_memory():
    x = torch.tensor([1.0, 2.0, 3.0])
    packet, _ = TopK(keep_ratio=1.0).encode({"w": x}, {}, RNG)
    x.zero_()
    assert packet.decode()["w"].tolist() == [1.0, 2.0, 3.0]
