import numpy as np

from rayfl.data.partition import label_counts
from rayfl.data.partitions.assign_by_prior import LEAST_SHARE, assign_by_prior, even_sizes, proportional_sizes


def test_even_sizes_differ_by_at_most_one_and_sum_up():
    assert even_sizes(10, 4).tolist() == [2, 3, 2, 3]


def test_proportional_sizes_go_by_the_largest_remainders():
    # 7 * (.5, .25, .25) = 3.5, 1.75, 1.75: floors 3, 1, 1, and the two left go to the remainders of .75.
    assert proportional_sizes(7, np.array([2.0, 1.0, 1.0])).tolist() == [3, 2, 2]
    assert proportional_sizes(10, np.ones(3)).tolist() == [4, 3, 3]


def test_one_label_a_client_is_dealt_exactly():
    labels = np.array([1, 0, 2, 1, 0, 2])
    shards = assign_by_prior(labels, np.eye(3), np.array([2, 2, 2]), np.random.default_rng(0))
    assert [shards[client].tolist() for client in range(3)] == [[1, 4], [0, 3], [2, 5]]


def test_a_client_whose_labels_have_run_out_goes_short():
    # Both clients want three examples of label 0, of which there are four; nobody may take label 1.
    labels = np.array([0, 0, 0, 0, 1, 1])
    for seed in range(20):
        shards = assign_by_prior(
            labels, np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([3, 3]), np.random.default_rng(seed)
        )
        assert sorted(shards.indices.tolist()) == [0, 1, 2, 3]
        assert sorted(shards.sizes.tolist()) in ([1, 3], [2, 2])


def test_a_client_with_a_floor_takes_what_is_left():
    labels = np.array([0, 0, 0, 0, 1, 1])
    priors = np.array([[1.0, LEAST_SHARE], [1.0, LEAST_SHARE]])
    for seed in range(20):
        shards = assign_by_prior(labels, priors, np.array([3, 3]), np.random.default_rng(seed))
        assert shards.sizes.tolist() == [3, 3]
        assert sorted(shards.indices.tolist()) == [0, 1, 2, 3, 4, 5]


def expected_counts(priors: np.ndarray, wants: tuple[int, ...], supply: tuple[int, ...]) -> np.ndarray:
    """The mean of the counts under the process as the specification tells it, by summing over all its paths."""
    total = np.zeros_like(priors)
    asking = [client for client, want in enumerate(wants) if want]
    for client in asking:
        left = priors[client] * (np.array(supply) > 0)
        for label in np.flatnonzero(left):
            chance = left[label] / left.sum() / len(asking)
            fewer_wants = tuple(want - (who == client) for who, want in enumerate(wants))
            fewer = tuple(have - (which == label) for which, have in enumerate(supply))
            total[client, label] += chance
            total += chance * expected_counts(priors, fewer_wants, fewer)
    return total


def test_the_law_is_that_of_one_random_request_after_another():
    priors = np.array([[0.8, 0.15, 0.05], [0.4, 0.1, 0.5]])
    wants, labels = (2, 3), np.array([0, 0, 1, 2, 2])
    exact = expected_counts(priors, wants, (2, 1, 2))
    draw, repeats = np.random.default_rng(0), 4000
    mean = np.zeros_like(exact)
    for _ in range(repeats):
        mean += label_counts(labels, assign_by_prior(labels, priors, np.array(wants), draw), 3) / repeats
    # A count is at most 2, so its standard deviation is at most 1, and that of the mean at most 1 / sqrt(4000) = 0.016.
    np.testing.assert_allclose(mean, exact, atol=0.05)
    # A process in which client 0 is always first would give it 2 * 0.8 * 0.8 + 2 * 0.8 * 0.2 = 1.6 of label 0.
    assert abs(exact[0, 0] - 1.6) > 0.1


def test_ten_thousand_clients_share_sixty_thousand_samples():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 10, 60_000)
    shards = assign_by_prior(labels, draw.dirichlet(np.full(10, 0.3), 10_000) + 1e-9, even_sizes(60_000, 10_000), draw)
    assert set(shards.sizes.tolist()) == {6}
    assert np.array_equal(np.sort(shards.indices), np.arange(60_000))
