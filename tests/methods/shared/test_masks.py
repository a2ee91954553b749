"""Masks: densities by hand, numbers of entries that never change, who goes and who comes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayfl.determinism.seeding import FirstDraws
from rayfl.methods.shared import masks
from rayfl.population.client import Traits
from tests.refusals import refused

shapes_drawn = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple), min_size=1
)


def params_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_erk_by_hand():
    # raw: 14/40 and 10/10. eps (0.35 * 40 + 10) = 0.4 * 50: eps = 20 / 24 = 5/6.
    assert masks.erk_densities({"w": (4, 10), "b": (10,)}, 0.4) == pytest.approx({"w": 0.35 * 5 / 6, "b": 5 / 6})


def test_erk_makes_dense_what_would_be_denser_than_dense():
    # raw: 0.35 and 1. eps = 0.6 * 50 / 24 = 1.25, so b is dense and eps = (0.6 * 40 - 0.4 * 10) / (0.35 * 40) = 20/14.
    assert masks.erk_densities({"w": (4, 10), "b": (10,)}, 0.6) == pytest.approx({"w": 0.35 * 20 / 14, "b": 1.0})


def test_erk_repeats_until_it_fits():
    # n = 4, 6, 100 with raw 1, 5/6, 1/5. All: eps = 88 / 29 > 1, dense. Then eps (5 + 20) = 0.8 * 106 - 0.2 * 4 = 84:
    # eps * 5/6 = 2.8, dense. Then eps * 20 = 80 - 0.2 * 10 = 78: density 0.78.
    found = masks.erk_densities({"v": (4,), "s": (2, 3), "l": (10, 10)}, 0.8)
    assert found == pytest.approx({"v": 1.0, "s": 1.0, "l": 0.78})


def test_the_power_sharpens_erk():
    # raw: 0.35^2 = 0.1225 and 1. eps = 0.2 * 50 / (4.9 + 10).
    found = masks.erk_densities({"w": (4, 10), "b": (10,)}, 0.2, power=2.0)
    assert found == pytest.approx({"w": 0.1225 * 10 / 14.9, "b": 10 / 14.9})
    assert masks.erk_densities({"w": (4, 10), "b": (10,)}, 0.3, power=0.0) == pytest.approx({"w": 0.3, "b": 0.3})


@settings(max_examples=200, deadline=None)
@given(shapes_drawn, st.floats(0.01, 1.0), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_erk_densities_sum_to_the_target(shapes: dict[str, tuple[int, ...]], density: float, power: float):
    found = masks.erk_densities(shapes, density, power)
    assert list(found) == list(shapes)
    assert all(0 < value <= 1 for value in found.values())
    total = sum(math.prod(shape) for shape in shapes.values())
    assert sum(found[name] * math.prod(shape) for name, shape in shapes.items()) == pytest.approx(density * total)


def test_everything_is_kept_at_density_1():
    shapes = {"w": (3, 7), "b": (3,), "number": ()}
    assert masks.erk_densities(shapes, 1.0) == pytest.approx(dict.fromkeys(shapes, 1.0))
    # Sums of these sizes round so that eps * 71/448, of the widest tensor, would be a little below 1.
    shapes = {"conv": (4, 2, 3, 3), "wide": (7, 64), "head": (3, 7), "hidden": (7,), "norm": (4,)}
    params = params_of(shapes)
    mask = masks.random_mask(params, masks.erk_densities(shapes, 1.0), np.random.default_rng(0))
    assert all(bool(kept.all()) for kept in mask.values())


def test_weights_only_leaves_biases_dense_and_out_of_the_count():
    params = params_of({"w": (4, 10), "b": (10,), "v": (10, 10)})
    # raw: 14/40 and 20/100. eps (14 + 20) = 0.3 * 140.
    found = masks.densities(params, 0.3, "erk", 1.0, "weights_only")
    assert found == pytest.approx({"w": 0.35 * 42 / 34, "v": 0.2 * 42 / 34})
    assert masks.densities(params, 0.3, "uniform", 1.0, "weights_only") == {"w": 0.3, "v": 0.3}
    assert masks.densities(params, 0.3, "uniform", 1.0, "all") == {"w": 0.3, "b": 0.3, "v": 0.3}
    mask = masks.random_mask(params, found, np.random.default_rng(0))
    assert [int(mask[name].sum()) for name in ("w", "b", "v")] == [int(14 * 42 / 34), 10, int(20 * 42 / 34)]


def test_a_random_mask_keeps_every_entry_equally_often():
    # 2000 masks of 3 of 10: 600 each. Without replacement the statistic is 0.7 * 10/9 = 7/9 of a chi-square with 9
    # degrees of freedom, whose 1e-6 quantile is 45.1.
    generator, params = np.random.default_rng(1), params_of({"w": (2, 5)})
    drawn = [masks.random_mask(params, {"w": 0.3}, generator)["w"] for _ in range(2000)]
    assert all(mask.dtype == torch.bool and mask.shape == (2, 5) and int(mask.sum()) == 3 for mask in drawn)
    counts = torch.stack(drawn).sum(dim=0).double()
    assert float(((counts - 600) ** 2 / 600).sum()) < 45.1 * 7 / 9


def test_a_random_mask_counts_as_the_other_counts_do():
    # 0.58 * 100 is 57.99999999999999 in floats.
    params = params_of({"w": (10, 10)})
    assert int(masks.random_mask(params, {"w": 0.58}, np.random.default_rng(0))["w"].sum()) == 58
    assert int(masks.random_mask(params, {"w": 0.579}, np.random.default_rng(0))["w"].sum()) == 57


def test_the_common_generator_is_common_and_nests_masks():
    params = {"w": torch.arange(50.0).reshape(5, 10), "b": torch.ones(5)}

    def mask(density: float, seed: int, client: int) -> Tensor:
        draws = FirstDraws(seed, client).common("common mask")
        return masks.random_mask(params, {"w": density, "b": 1.0}, draws)["w"]

    thin = mask(0.2, seed=1, client=0)
    assert int(thin.sum()) == 10
    assert bool((mask(0.6, seed=1, client=0) | ~thin).all())
    assert torch.equal(mask(0.2, seed=1, client=3), thin)
    assert not torch.equal(mask(0.2, seed=2, client=0), thin)


@pytest.mark.parametrize(
    ("given", "client", "expected"),
    [
        (0.3, Traits(0, 1, retention_ratio=0.9, retention_given=True), 0.3),
        (None, Traits(0, 1, retention_ratio=0.9, retention_given=True), 0.9),
        (None, Traits(0, 1, retention_ratio=1.0, retention_given=True), 1.0),
        (None, Traits(0, 1), 0.5),
    ],
)
def test_who_says_how_much_is_kept(given: float | None, client: Traits, expected: float):
    assert masks.kept_ratio(client, given, 0.5) == expected


def test_the_share_that_moves_falls_along_a_cosine():
    # (0.5 / 2) (1 + cos(pi t / 8)): 0.5 at t = 0, (0.5 / 2)(1 + sqrt(1/2)) at 2, half of it at 4, nearly 0 at the end.
    assert masks.annealed(0.5, 0, 8) == 0.5
    assert masks.annealed(0.5, 2, 8) == pytest.approx(0.25 * (1 + math.sqrt(0.5)))
    assert masks.annealed(0.5, 4, 8) == pytest.approx(0.25)
    assert masks.annealed(0.5, 7, 8) == pytest.approx(0.25 * (1 - math.cos(math.pi / 8)))


def test_a_search_by_hand():
    # 6 of 8 are kept and ceil(0.3 * 6) = 2 go: positions 0 and 6. Idle are 0, 2, 5, 6 and of them 5 and 6 come back.
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]], dtype=torch.bool)
    weight = torch.tensor([[0.1, -3.0, 0.0, 4.0], [0.5, 0.0, -0.2, 0.3]])
    gradient = torch.tensor([[0.0, 9.0, 1.0, 9.0], [9.0, -3.0, 2.0, 9.0]])
    new = masks.search("w", mask, weight, 0.3, masks.by_gradient("w", gradient))
    assert new.int().tolist() == [[0, 1, 0, 1], [1, 1, 1, 1]]


def test_ties_go_to_the_lowest_index():
    # 2 of 4 equal weights go: 0 and 1 stay. All gradients are 0: the first two idle entries, 2 and 3, come back.
    mask = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)
    new = masks.search("w", mask, torch.tensor([2.0, -2, 2, -2, 0, 0]), 0.5, masks.by_gradient("w", torch.zeros(6)))
    assert new.int().tolist() == [1, 1, 1, 1, 0, 0]
    kept = masks.search("w", mask, torch.tensor([2.0, -2, 2, -2, 0, 0]), 0.5, lambda idle, count: np.array([2, 3]))
    assert kept.int().tolist() == [1, 1, 0, 0, 1, 1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**20), st.booleans())
def test_a_search_keeps_the_number_of_entries(size: int, density: float, share: float, seed: int, random: bool):
    # Dense, empty, and with fewer idle entries than go, among others.
    draw = np.random.default_rng(seed)
    mask = torch.from_numpy(draw.permutation(size) < int(density * size))
    weight, gradient = torch.from_numpy(draw.standard_normal((2, size)).astype(np.float32))
    regrow = masks.at_random(draw) if random else masks.by_gradient("w", gradient)
    new = masks.search("w", mask, weight, share, regrow)
    assert int(new.sum()) == int(mask.sum())
    num_moved = math.ceil(share * int(mask.sum()))
    stay = np.argsort(-np.where(mask, weight.abs(), -1.0))[: int(mask.sum()) - num_moved]
    assert bool(new[torch.from_numpy(stay)].all())


def test_random_regrowth_is_uniform_over_all_that_is_idle():
    # 4 of 8 kept, 2 go (0 and 1), 6 idle: each comes with chance 1/3 in 3000 searches, deviation at most 0.0087.
    mask, weight = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool), torch.tensor([1.0, 2, 8, 9, 0, 0, 0, 0])
    draw = np.random.default_rng(3)
    found = torch.stack([masks.search("w", mask, weight, 0.5, masks.at_random(draw)) for _ in range(3000)])
    share = found.double().mean(dim=0)
    assert share[2:4].tolist() == [1.0, 1.0]
    assert float((share[[0, 1, 4, 5, 6, 7]] - 1 / 3).abs().max()) < 5 * 0.0087


def test_a_gradient_that_is_no_number_is_refused():
    with refused(names=["'w'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        masks.by_gradient("w", torch.tensor([1.0, math.nan]))


def test_masked_zeros_have_no_sign():
    x = masks.masked({"w": torch.tensor([-1.0, -2.0])}, {"w": torch.tensor([True, False])})["w"]
    assert x.tolist() == [-1.0, 0.0]
    assert not bool(torch.signbit(x[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masking_keeps_every_bit_of_what_it_keeps(dtype: torch.dtype):
    numbers = torch.tensor([-0.0, math.nan, -math.inf, 1e-45, 3.0, -0.0, math.nan, math.inf, 1e-45, 3.0], dtype=dtype)
    mask = torch.arange(10) < 5
    x = masks.masked({"w": numbers}, {"w": mask})["w"]
    assert x.dtype == dtype
    assert x.numpy().tobytes() == numbers[:5].numpy().tobytes() + bytes(5 * numbers.element_size())


@pytest.mark.parametrize("stacked", [(0, 0), (0, None), (None, 0)], ids=["both", "numbers", "masks"])
def test_masking_a_stack_gives_the_bits_of_masking_each(stacked: tuple[int | None, int | None]):
    rows = torch.tensor([[-0.0, math.nan, -math.inf, 1e-45], [2.0, -0.0, math.nan, -1e-45]])
    rows = torch.cat([rows, -rows])
    kept = torch.tensor([[True, True, True, True], [False, False, False, False], [True, False] * 2, [False, True] * 2])
    given = [whole if dim == 0 else whole[2] for whole, dim in zip((rows, kept), stacked, strict=True)]
    stack = torch.vmap(lambda x, mask: masks.masked({"w": x}, {"w": mask})["w"], in_dims=stacked)(*given)
    each = [
        masks.masked({"w": given[0] if stacked[0] is None else x}, {"w": given[1] if stacked[1] is None else mask})["w"]
        for x, mask in zip(rows, kept, strict=True)
    ]
    assert stack.numpy().tobytes() == b"".join(one.numpy().tobytes() for one in each)


def test_masked_weights_have_a_gradient():
    weights = torch.tensor([2.0, 3.0], requires_grad=True)
    masks.masked({"w": weights}, {"w": torch.tensor([True, False])})["w"].sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [1.0, 0.0]


def test_prune_quantile_is_strict():
    # Kept magnitudes 1 2 3 4 5: the quantile 0.25 is 2 exactly, which stays; 0.3 is 2.2 and takes 2 too.
    mask = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool)
    weight = torch.tensor([-1.0, 2.0, 3.0, 0.1, -4.0, 5.0])
    assert masks.prune_quantile(mask, weight, 0.25).int().tolist() == [0, 1, 1, 0, 1, 1]
    assert masks.prune_quantile(mask, weight, 0.3).int().tolist() == [0, 0, 1, 0, 1, 1]
    nothing = torch.zeros(6, dtype=torch.bool)
    assert torch.equal(masks.prune_quantile(nothing, weight, 0.3), nothing)
