import numpy as np

from rayfl.data.datasets import Dataset
from rayfl.data.partition import label_counts
from rayfl.data.partitions.dirichlet import DirichletClass, DirichletClient, DirichletSizes, SharedGroups
from rayfl.determinism.seeding import generator
from rayfl.report.partition_table import distances
from tests.data.toys import balanced
from tests.refusals import refused

TEN = balanced(num_classes=10, train_per_class=400, test_per_class=200)


def counts_of(scheme, num_clients: int, dataset: Dataset = TEN) -> np.ndarray:
    partition = scheme.split(dataset, num_clients, generator(0))
    return label_counts(dataset.train.labels, partition.train, dataset.num_classes)


def test_client_priors_give_equal_sizes():
    assert counts_of(DirichletClient(), 16).sum(axis=1).tolist() == [250] * 16


def test_alpha_goes_from_one_class_each_to_alike():
    far = [distances(counts_of(DirichletClient(alpha=alpha), 20)).mean() for alpha in (0.01, 0.3, 1e6)]
    # Two hundred examples of 10 equally likely classes: each share is 0.1 with a standard deviation of 0.021, and the
    # distance, half the sum of ten absolute deviations, is about 0.5 * 10 * 0.8 * 0.021 = 0.085.
    assert far[2] < 0.12
    assert far[2] < far[1] < far[0]
    # Ten classes for 20 clients of half a class each: one class a client would be a distance of 0.9, but classes drawn
    # by more than two clients run out, and those clients go on with what others left.
    assert far[0] > 0.6


def test_test_splits_have_100_to_106_samples_with_ten_classes():
    partition = DirichletClient().split(TEN, 20, generator(0))
    counts = label_counts(TEN.train.labels, partition.train, 10)
    expected = np.ceil(counts * 100 / 200 - 1e-9)
    assert np.array_equal(label_counts(TEN.test.labels, partition.test, 10), expected)
    assert 100 <= partition.test.sizes.min() <= partition.test.sizes.max() <= 109


def test_clients_of_a_group_share_their_prior():
    dataset = balanced(num_classes=5, train_per_class=2000, test_per_class=100)
    counts = counts_of(SharedGroups(num_groups=2, alpha=0.5), 6, dataset)
    shares = counts / counts.sum(axis=1, keepdims=True)
    # 1,667 examples a client: a share deviates by at most 0.5 / sqrt(1667) = 0.012 from that of its group.
    for group in (shares[:3], shares[3:]):
        assert np.abs(group - group.mean(axis=0)).max() < 0.06
    assert np.abs(shares[:3].mean(axis=0) - shares[3:].mean(axis=0)).max() > 0.1


def test_more_groups_than_clients_are_refused():
    with refused(names=["num_groups=4", "clients.count=3"]):
        SharedGroups().split(TEN, 3, generator(0))


def test_log_normal_sizes():
    assert set(counts_of(DirichletSizes(sigma=0.0), 16).sum(axis=1).tolist()) == {250}
    partition = DirichletSizes(sigma=0.3).split(TEN, 400, generator(0))
    # Ten examples a client on average; the spread of log-sizes is 0.3, rounding adds a little. Standard error 0.3 / 28.
    assert abs(np.log(partition.train.sizes).std() - 0.3) < 0.05
    assert np.array_equal(np.sort(partition.test.indices), np.arange(2000))
    # The test split is half as large and follows the same proportions, up to the rounding of either.
    assert np.abs(partition.test.sizes - partition.train.sizes / 2).max() <= 1.0


def test_test_labels_follow_the_same_priors():
    partition = DirichletSizes(alpha=0.1).split(TEN, 10, generator(0))
    train = label_counts(TEN.train.labels, partition.train, 10) / 400
    test = label_counts(TEN.test.labels, partition.test, 10) / 200
    # Unrelated priors of this alpha would be about 0.8 apart.
    assert 0.5 * np.abs(train - test).sum(axis=1).mean() < 0.15


def test_classes_are_shared_out_until_every_client_has_enough():
    counts = counts_of(DirichletClass(alpha=0.5, min_samples=50), 20)
    assert counts.sum(axis=0).tolist() == [400] * 10
    assert counts.sum(axis=1).min() >= 50


def test_full_clients_get_no_more_classes():
    # With so small an alpha each class goes to one client whole. Of four classes the first two clients to be chosen
    # are full after two, and get no third one.
    dataset = balanced(num_classes=4, train_per_class=100, test_per_class=10)
    for seed in range(10):
        partition = DirichletClass(alpha=1e-4).split(dataset, 2, generator(seed))
        assert partition.train.sizes.tolist() == [200, 200]
        assert partition.test.sizes.tolist() == [20, 20]


def test_the_test_classes_are_shared_out_like_the_train_classes():
    partition = DirichletClass(alpha=0.5).split(TEN, 10, generator(0))
    train = label_counts(TEN.train.labels, partition.train, 10)
    test = label_counts(TEN.test.labels, partition.test, 10)
    assert test.sum() == 2000
    # Each is cut at the same proportions, rounded down at both of its ends: 400 p and 200 p differ by less than that.
    assert np.abs(test - train / 2).max() <= 1.5


def test_a_draw_that_cannot_succeed_says_what_to_change():
    with refused(names=["alpha=0.001", "50 clients", "min_samples=10", "raise"]):
        DirichletClass(alpha=0.001).split(TEN, 50, generator(0))


def test_alpha_must_be_positive():
    with refused(names=["alpha=0", "(0, 1e+12]"]):
        DirichletClient(alpha=0)
