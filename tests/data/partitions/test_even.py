import numpy as np
import pytest

from rayfl.data.partitions.labels import LambdaRatio
from rayfl.data.partitions.plain import Iid
from rayfl.determinism.seeding import generator
from tests.data.toys import balanced
from tests.refusals import refused


def test_iid_sizes_differ_by_at_most_one():
    partition = Iid().split(balanced(3, 11, 5), 4, generator(0))
    assert sorted(partition.train.sizes.tolist()) == [8, 8, 8, 9]
    assert sorted(partition.test.sizes.tolist()) == [3, 4, 4, 4]


def test_lambda_one_gives_each_client_one_run_of_labels():
    dataset = balanced(num_classes=4, train_per_class=6, test_per_class=2)
    partition = LambdaRatio(ratio=1.0).split(dataset, 4, generator(0))
    for client in range(4):
        assert dataset.train.labels[partition.train[client]].tolist() == [client] * 6
        assert dataset.test.labels[partition.test[client]].tolist() == [client] * 2


def test_lambda_one_cuts_blocks_and_not_classes():
    # Three classes of 4 for two clients: six consecutive examples are all of class 0 and half of class 1.
    dataset = balanced(num_classes=3, train_per_class=4, test_per_class=2)
    partition = LambdaRatio(ratio=1.0).split(dataset, 2, generator(0))
    assert sorted(dataset.train.labels[partition.train[0]].tolist()) == [0, 0, 0, 0, 1, 1]
    assert sorted(dataset.train.labels[partition.train[1]].tolist()) == [1, 1, 2, 2, 2, 2]


def test_lambda_half_is_half_a_run_of_labels_and_half_at_random():
    dataset = balanced(num_classes=4, train_per_class=50, test_per_class=20)
    partition = LambdaRatio(ratio=0.5).split(dataset, 4, generator(0))
    assert partition.train.sizes.tolist() == [50] * 4
    # The same first draw again: its first half is what was sorted, and client i holds the i-th quarter of it.
    order = generator(0).permutation(200)
    by_label = sorted(order[:100].tolist(), key=lambda sample: dataset.train.labels[sample])
    for client in range(4):
        block = set(by_label[25 * client : 25 * client + 25])
        assert block <= set(partition.train[client].tolist())
        rest = set(partition.train[client].tolist()) - block
        assert rest <= set(order[100:].tolist())
    # Of the 25 random examples about 6 are of the client's own class, so it holds about 31 of 50 (lambda 0: 12.5).
    own = [np.mean(dataset.train.labels[partition.train[client]] == client) for client in range(4)]
    assert 0.5 < np.mean(own) < 0.75


def test_lambda_zero_is_iid():
    dataset = balanced(num_classes=2, train_per_class=500, test_per_class=20)
    partition = LambdaRatio(ratio=0.0).split(dataset, 2, generator(0))
    # 500 random ones of 1,000: the number of class 0 has a standard deviation of 7.9 around 250.
    assert abs(np.sum(dataset.train.labels[partition.train[0]] == 0) - 250) < 40


@pytest.mark.parametrize("ratio", [-0.01, 1.01])
def test_lambda_outside_its_range_is_refused(ratio):
    with refused(names=["ratio=", "[0, 1]"]):
        LambdaRatio(ratio=ratio)
