"""Matching against the scores of single assignments, and against every assignment there is."""

import itertools

import numpy as np
import pytest

from rayfl.methods.server.pfnm import Layer, Matching, Prior, merge


def network(widths: tuple[int, ...], seed: int) -> list[Layer]:
    draw = np.random.default_rng(seed)
    return [(draw.standard_normal((b, a)), draw.standard_normal(b)) for a, b in itertools.pairwise(widths)]


def permuted(layers: list[Layer], seed: int) -> list[Layer]:
    """The same function with the neurons of every hidden layer in another order."""
    draw = np.random.default_rng(seed)
    orders = [np.arange(layers[0][0].shape[1]), *[draw.permutation(len(bias)) for _, bias in layers[:-1]]]
    orders.append(np.arange(len(layers[-1][1])))
    return [
        (weight[after][:, before], bias[after])
        for (weight, bias), (before, after) in zip(layers, itertools.pairwise(orders), strict=True)
    ]


def output(layers: list[Layer], x: np.ndarray) -> np.ndarray:
    for weight, bias in layers[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ layers[-1][0].T + layers[-1][1]


def merged(networks: list[list[Layer]], sweeps: int = 5, posterior: bool = False, **prior: float) -> list[Layer]:
    return merge(networks, Prior(**prior), sweeps, posterior, np.random.default_rng(0))


@pytest.mark.parametrize("widths", [(5, 9, 3), (5, 8, 7, 3), (4, 6, 6, 6, 2)])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_permuted_copies_of_a_network_merge_into_it(widths: tuple[int, ...], copies: int):
    original = network(widths, seed=1)
    found = merged([permuted(original, seed) for seed in range(copies)])
    assert [len(bias) for _, bias in found] == list(widths[1:])
    # The same neurons: the first hidden layer's incoming weights and biases, in some order.
    rows = [np.column_stack(layers[0]) for layers in (original, found)]
    one, other = (each[np.lexsort(each.T)] for each in rows)
    np.testing.assert_allclose(other, one, atol=1e-12)
    x = np.random.default_rng(2).standard_normal((20, widths[0]))
    np.testing.assert_allclose(output(found, x), output(original, x), atol=1e-12)


def test_neurons_that_nobody_shares_stay_apart():
    # Two networks with half of their neurons in common: 4 + 2 + 2 global ones.
    one = network((6, 6, 3), seed=3)
    two = network((6, 6, 3), seed=4)
    for layer, columns in ((0, False), (1, True)):
        weight, own = one[layer][0], two[layer][0]
        if columns:
            own[:, :4] = weight[:, :4]
        else:
            own[:4], two[0][1][:4] = weight[:4], one[0][1][:4]
    apart = [[(5 * one[0][0], one[0][1]), one[1]], [(5 * two[0][0], two[0][1]), two[1]]]
    found = merged(apart, gamma=50.0)
    assert len(found[0][1]) == 8
    common = found[0][0][[np.abs(found[0][0] - row).sum(axis=1).argmin() for row in apart[0][0][0][:4]]]
    np.testing.assert_allclose(common, apart[0][0][0][:4], atol=1e-12)


def test_the_posterior_is_drawn_to_the_prior_mean():
    # (mu0 / s0 + sum v / s) / (1 / s0 + J / s) with s = 4, s0 = 0.25, J = 3: (4 mu0 + 0.75 v) / 4.75.
    original = network((4, 1, 2), seed=5)
    found = merged([original] * 3, posterior=True, sigma=2.0, sigma0=0.5, bias=0.3, gamma=1e-9)
    np.testing.assert_allclose(found[0][0], 0.75 * original[0][0] / 4.75)
    np.testing.assert_allclose(found[0][1], (4 * 0.3 + 0.75 * original[0][1]) / 4.75)
    np.testing.assert_allclose(found[1][0], 0.75 * original[1][0] / 4.75)
    np.testing.assert_allclose(found[1][1], (4 * 0.3 + 0.75 * original[1][1]) / 4.75)


def score(v, others, count, num_networks, mean, prior: Prior) -> float:
    """An existing global neuron with these others, written out."""
    s, s0 = prior.sigma**2, prior.sigma0**2
    before = mean / s0 + sum(other / s for other in others)
    after = before + v / s
    value = after @ after / (1 / s0 + 1 / s + count / s) - before @ before / (1 / s0 + count / s)
    return value + np.log(count / (num_networks - count))


def test_scores_are_those_of_the_formula():
    draw, prior = np.random.default_rng(6), Prior(sigma=0.7, sigma0=1.3, gamma=2.0)
    neurons = [draw.standard_normal((3, 4)) for _ in range(4)]
    mean = np.array([0.0, 0.1, 0.0, 0.0])
    matching = Matching(neurons, mean, prior)
    for j in range(3):
        matching.assign(j)
    scores = matching.scores(neurons[3])
    s, s0 = prior.sigma**2, prior.sigma0**2
    for row, v in enumerate(neurons[3]):
        for column in range(len(matching.count)):
            others = [neurons[j][np.flatnonzero(matching.assigned[j] == column)[0]]
                      for j in range(3) if column in matching.assigned[j]]  # fmt: skip
            expected = score(v, others, len(others), 4, mean, prior)
            assert scores[row, column] == pytest.approx(expected, abs=1e-10)
        for rank in (1, 2, 3):
            new = (mean / s0 + v / s) @ (mean / s0 + v / s) / (1 / s0 + 1 / s) - (mean / s0) @ (mean / s0) * s0
            new += -2 * np.log(rank) + 2 * np.log(prior.gamma / 4)
            assert scores[row, len(matching.count) + rank - 1] == pytest.approx(new, abs=1e-10)


def test_the_best_of_all_assignments_is_taken():
    draw = np.random.default_rng(7)
    neurons = [draw.standard_normal((3, 3)) for _ in range(2)]
    matching = Matching(neurons, np.zeros(3), Prior(gamma=1.5))
    matching.assign(0)
    scores = matching.scores(neurons[1])
    best = max(
        sum(scores[row, column] for row, column in enumerate(columns))
        for columns in itertools.permutations(range(scores.shape[1]), 3)
    )
    known = len(matching.count)
    matching.assign(1)
    taken, ranks = matching.assigned[1], itertools.count(known)
    value = sum(scores[row, c if c < known else next(ranks)] for row, c in enumerate(taken))
    assert value == pytest.approx(best)


def test_sweeps_keep_the_books():
    draw = np.random.default_rng(8)
    centres = 3 * draw.standard_normal((5, 4))
    neurons = [centres[draw.permutation(5)[:4]] + 0.1 * draw.standard_normal((4, 4)) for _ in range(6)]
    matching = Matching(neurons, np.zeros(4), Prior(sigma=0.3, sigma0=3.0))
    matching.run(4, np.random.default_rng(0))
    assert len(matching.count) == 5
    total, count = np.zeros((5, 4)), np.zeros(5, int)
    for columns, own in zip(matching.assigned, neurons, strict=True):
        assert len(set(columns)) == len(own)
        np.add.at(total, columns, own)
        np.add.at(count, columns, 1)
    np.testing.assert_allclose(matching.total, total)
    assert matching.count.tolist() == count.tolist()
    # And every local neuron lies with its centre.
    distances = np.linalg.norm((total / count[:, None])[:, None] - centres[None], axis=2)
    assert distances.min(axis=1).max() < 0.3
