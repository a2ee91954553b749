import numpy as np

from rayfl.data.partition import Shards, label_counts
from rayfl.data.partitions.labels import LabelsPerClient, Pathological
from rayfl.data.partitions.matching_test_split import matching_test_split
from rayfl.determinism.seeding import generator
from tests.data.toys import balanced
from tests.refusals import refused

MANY = balanced(num_classes=10, train_per_class=103, test_per_class=12)


def test_each_agent_holds_its_number_of_labels_and_shares_them_equally():
    partition = LabelsPerClient(labels_per_client=3).split(MANY, 20, generator(0))
    counts = label_counts(MANY.train.labels, partition.train, 10)
    assert np.count_nonzero(counts, axis=1).tolist() == [3] * 20
    for label in range(10):
        holders = np.flatnonzero(counts[:, label])
        if len(holders):
            share = 103 // len(holders)
            expected = [share] * (len(holders) - 1) + [share + 103 % len(holders)]
            assert counts[holders, label].tolist() == expected


def test_an_agent_is_tested_on_all_test_samples_of_its_labels():
    partition = LabelsPerClient(labels_per_client=4).split(MANY, 5, generator(1))
    for client in range(5):
        held = np.unique(MANY.train.labels[partition.train[client]])
        assert partition.test[client].tolist() == np.flatnonzero(np.isin(MANY.test.labels, held)).tolist()
        assert len(partition.test[client]) == 4 * 12


def test_classes_nobody_drew_are_not_used():
    partition = LabelsPerClient(labels_per_client=1).split(MANY, 3, generator(0))
    assert len(np.unique(MANY.train.labels[partition.train.indices])) <= 3


def test_used_ratio_rounds_each_share_down():
    full = LabelsPerClient(labels_per_client=2).split(MANY, 6, generator(0))
    fifth = LabelsPerClient(labels_per_client=2, used_ratio=0.2).split(MANY, 6, generator(0))
    counts = label_counts(MANY.train.labels, full.train, 10)
    assert np.array_equal(label_counts(MANY.train.labels, fifth.train, 10), counts // 5)


def test_more_labels_than_classes_are_refused():
    with refused(names=["11 classes", "numbered", "10"]):
        LabelsPerClient(labels_per_client=11).split(MANY, 2, generator(0))


def test_pathological_clients_hold_only_their_classes():
    partition = Pathological(classes_per_client=2).split(MANY, 10, generator(0))
    counts = label_counts(MANY.train.labels, partition.train, 10)
    assert np.count_nonzero(counts, axis=1).max() == 2
    # Ten clients want 103 examples each, and nobody can get more.
    assert partition.train.sizes.max() == 103


def test_pathological_classes_have_equal_shares_where_there_is_enough():
    dataset = balanced(num_classes=4, train_per_class=1000, test_per_class=300)
    partition = Pathological(classes_per_client=4).split(dataset, 2, generator(0))
    counts = label_counts(dataset.train.labels, partition.train, 4)
    # 2,000 of 4,000 examples at a quarter each: 500 with a standard deviation below sqrt(2000 * 3 / 16) = 19.4.
    assert np.abs(counts - 500).max() < 80


def test_the_test_split_has_the_shares_of_the_train_split():
    dataset = balanced(num_classes=3, train_per_class=100, test_per_class=100)
    of_label = [np.flatnonzero(dataset.train.labels == label) for label in range(3)]
    train = Shards.of([np.concatenate([of_label[0][:7], of_label[1][:93]]), of_label[2][:1]])
    test = matching_test_split(dataset, train, 100, generator(0))
    assert label_counts(dataset.test.labels, test, 3).tolist() == [[7, 93, 0], [0, 0, 100]]
    thirds = Shards.of([np.array([of_label[0][0], of_label[1][0], of_label[2][0]])])
    # ceil(100 / 3) = 34 of each label: 102 examples.
    assert label_counts(dataset.test.labels, matching_test_split(dataset, thirds, 100, generator(0)), 3).tolist() == [
        [34, 34, 34]
    ]


def test_a_small_test_set_shrinks_the_split_and_keeps_its_shares():
    dataset = balanced(num_classes=2, train_per_class=10, test_per_class=6)
    of_label = [np.flatnonzero(dataset.train.labels == label) for label in range(2)]
    train = Shards.of([np.concatenate([of_label[0][:6], of_label[1][:2]]), of_label[1][2:3]])
    # Three quarters of label 0 must fit into 6 examples: 8 in all, and 2 of label 1. The other client takes all 6.
    assert label_counts(dataset.test.labels, matching_test_split(dataset, train, 100, generator(0)), 2).tolist() == [
        [6, 2],
        [0, 6],
    ]


def test_test_splits_are_drawn_independently():
    dataset = balanced(num_classes=1, train_per_class=4, test_per_class=400)
    test = matching_test_split(dataset, Shards.of([np.array([0]), np.array([1])]), 100, generator(0))
    shared = set(test[0].tolist()) & set(test[1].tolist())
    # Two independent hundreds of 400 share 25 on average (hypergeometric, standard deviation 3.8).
    assert 5 < len(shared) < 45
