"""The shortest convex combination: closed forms, a search of the simplex, and a bound that proves the optimum."""

import itertools

import numpy as np
import pytest
import torch

from rayfl.methods.server.fedmgda import COLUMNS, gram, minimum_norm_weights
from tests.refusals import refused
from tests.small_cases import small_cases


def gap(products: np.ndarray, weights: np.ndarray, low: float, high: float) -> float:
    """At least the distance of lambda^T G lambda / 2 from its minimum (Frank-Wolfe): g.lambda - min over the box."""
    gradient, left = products @ weights, 1 - low * len(weights)
    best = np.full(len(weights), float(low))
    for entry in np.argsort(gradient):
        best[entry] += min(high - low, left)
        left -= min(high - low, left)
    return float(gradient @ (weights - best))


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        ((1.0, 0.0), (0.0, 2.0), 0.0, 1.0),
        ((1.0, 0.0), (0.0, 2.0), 0.4, 0.6),
        ((1.0, 1.0), (3.0, 3.0), 0.0, 1.0),
        ((-1.0, 0.5), (2.0, 0.5), 0.3, 0.7),
        ((1.0, 0.0), (-1.0, 0.0), 0.0, 1.0),
    ],
)
def test_two_vectors_have_a_closed_form(first, second, low, high):
    a, b = np.array(first), np.array(second)
    share = np.clip((b - a) @ b / ((a - b) @ (a - b)), low, high)
    vectors = np.stack([a, b])
    weights = minimum_norm_weights(vectors @ vectors.T, low, high)
    np.testing.assert_allclose(weights, [share, 1 - share], atol=1e-12)


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_point_of_a_fine_grid_is_shorter(seed: int, epsilon: float):
    vectors = np.random.default_rng(seed).standard_normal((4, 3)) + 0.7
    products = vectors @ vectors.T
    weights = minimum_norm_weights(products, max(0.0, 0.25 - epsilon), min(1.0, 0.25 + epsilon))
    grid = np.array([g for g in itertools.product(range(81), repeat=3) if sum(g) <= 80]) / 80
    grid = np.column_stack([grid, 1 - grid.sum(axis=1)])
    grid = grid[(np.abs(grid - 0.25) <= epsilon + 1e-12).all(axis=1)]
    values = np.einsum("ni,ij,nj->n", grid, products, grid)
    best = weights @ products @ weights
    assert best <= values.min() + 1e-12
    # And the grid comes close, so that something was searched: its points lie 1/80 apart.
    assert values.min() - best <= 3 * 4 * (1 / 80) * np.abs(products).max()


@small_cases("seed", range(200))
def test_the_optimum_is_reached_to_rounding(seed: int):
    # Vectors that repeat, more vectors than dimensions, boxes down to one point.
    draw = np.random.default_rng(seed)
    count, dim = int(draw.integers(1, 14)), int(draw.integers(1, 16))
    vectors = draw.standard_normal((count, dim)) + draw.choice([0, 1, 3])
    if seed % 3 == 0:
        vectors = vectors[draw.integers(0, count, count)]
    epsilon = draw.choice([0.0, 0.01, 0.1, 0.3, 1.0])
    low, high = max(0.0, 1 / count - epsilon), min(1.0, 1 / count + epsilon)
    products = vectors @ vectors.T
    weights = minimum_norm_weights(products, low, high)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert low - 1e-15 <= weights.min() <= weights.max() <= high + 1e-15
    assert gap(products, weights, low, high) <= 1e-12 * np.abs(products).max()


@small_cases("count, dim, apart, epsilon", itertools.product([2, 10, 50], [1, 3, 200], [1e-5, 1e-7, 1e-8], [0.1, 1.0]))
def test_vectors_that_hardly_differ_have_a_shortest_combination(count: int, dim: int, apart: float, epsilon: float):
    # The curvature of their differences, apart^2, is lost in the rounding of G; the slope, apart, is not.
    draw = np.random.default_rng(count)
    vectors = draw.standard_normal(dim) + apart * draw.standard_normal((count, dim))
    low, high = max(0.0, 1 / count - epsilon), min(1.0, 1 / count + epsilon)
    products = vectors @ vectors.T
    weights = minimum_norm_weights(products, low, high)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert low - 1e-15 <= weights.min() <= weights.max() <= high + 1e-15
    assert gap(products, weights, low, high) <= 1e-12 * np.abs(products).max()


def test_bounds_that_leave_nothing_are_refused():
    with refused(names=["low=0.6", "high=1.0", "1/2"]):
        minimum_norm_weights(np.eye(2), 0.6, 1.0)


def test_inner_products_are_those_of_float64():
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (3, COLUMNS // 2 + 1), "b": (), "c": (0,)}
    vectors = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(3)]
    flat = np.stack([np.concatenate([t.double().numpy().ravel() for t in vector.values()]) for vector in vectors])
    np.testing.assert_allclose(gram(vectors), flat @ flat.T, rtol=1e-12, atol=1e-9)
