from dataclasses import replace

import numpy as np
import pytest

from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partitions.plain import Natural
from rayfl.determinism.seeding import generator
from tests.data.toys import balanced
from tests.refusals import check_sentence, refused


def written_by(train_groups: list[int], test_groups: list[int]) -> Dataset:
    def examples(groups: list[int]) -> Examples:
        return Examples(np.zeros((len(groups), 1), np.float32), np.zeros(len(groups), np.int64), np.array(groups))

    return Dataset("letters", examples(train_groups), examples(test_groups), 2, "vector")


def test_each_writer_is_a_client_in_the_order_of_their_numbers():
    partition = Natural().split(written_by([7, 3, 7, 3, 3], [3, 7, 7]), 2, generator(0))
    assert [partition.train[client].tolist() for client in range(2)] == [[1, 3, 4], [0, 2]]
    assert [partition.test[client].tolist() for client in range(2)] == [[0], [1, 2]]


def test_writers_with_fewer_than_two_samples_are_dropped():
    # Writer 1 has one example, writer 4 has one of each, writer 9 only a test example.
    letters = written_by([1, 4, 5, 5], [4, 9])
    partition = Natural().split(letters, 2, generator(0))
    assert [partition.train[client].tolist() for client in range(2)] == [[1], [2, 3]]
    assert [partition.test[client].tolist() for client in range(2)] == [[0], []]
    with refused(names=["clients.count=3", "2 owners", "min_samples=2"]):
        Natural().split(letters, 3, generator(0))
    assert len(Natural(min_samples=1).split(letters, 3, generator(0)).train) == 3


def test_fewer_clients_are_a_random_choice_of_writers():
    dataset = written_by(np.repeat(np.arange(20), 3).tolist(), [])
    chosen = [tuple(Natural().split(dataset, 5, generator(seed)).train.indices[::3] // 3) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 5


def test_more_clients_than_writers_are_refused():
    with refused(names=["clients.count=3", "letters", "2 owners"]):
        Natural().split(written_by([0, 0, 1, 1], []), 3, generator(0))


def test_data_without_writers_is_refused():
    with refused(names=["natural", "numbered", "data.owners", "iid"]):
        Natural().split(balanced(2, 5, 5), 2, generator(0))


def test_owners_and_samples_that_are_left_out_are_counted(caplog: pytest.LogCaptureFixture):
    # 11 owners with 20 examples each, of which the test has 4.
    groups = np.repeat(np.arange(11), 20)
    is_test = np.tile(np.arange(20) < 4, 11)
    dataset = replace(written_by(groups[~is_test].tolist(), groups[is_test].tolist()), name="firms")
    Natural().split(dataset, 11, generator(0))
    assert not caplog.messages
    Natural().split(dataset, 5, generator(0))
    (notice,) = caplog.messages
    check_sentence(notice, ["firms", "5 of 11 owners (100 of 220 examples)", "clients.count"])


def test_test_samples_of_owners_without_train_samples_are_counted(caplog: pytest.LogCaptureFixture):
    dataset = replace(written_by([0, 0, 1, 1], [0, 1, 2, 2, 7]), name="wards")
    partition = Natural().split(dataset, 2, generator(0))
    assert partition.test.sizes.tolist() == [1, 1]
    (notice,) = caplog.messages
    check_sentence(notice, ["wards", "3 of 5 test examples", "2 owners", "pooled"])
