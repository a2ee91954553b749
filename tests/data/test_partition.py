import pickle

import numpy as np
import pytest

from rayfl.data.partition import Partition, Shards
from rayfl.determinism.seeding import generator
from tests.refusals import refused


def partition_of(sizes: list[int]) -> Partition:
    train = Shards.of(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    empty = Shards.empty(len(sizes))
    return Partition(train=train, validation=empty, heldout=empty, test=train)


def test_shards_are_views_into_one_array():
    shards = Shards.of([np.array([4, 2]), np.array([], np.int64), np.array([7])])
    assert [shards[client].tolist() for client in range(len(shards))] == [[4, 2], [], [7]]
    assert shards.sizes.tolist() == [2, 0, 1]
    assert shards.owners.tolist() == [0, 0, 2]
    assert np.shares_memory(shards[0], shards.indices)
    assert (shards.indices.dtype, shards.offsets.tolist()) == (np.int64, [0, 2, 2, 3])


def test_shards_from_owners_are_sorted_within_each_client():
    shards = Shards.per_owner(np.array([9, 1, 5, 3]), np.array([2, 0, 2, 0]), num_clients=4)
    assert [shards[client].tolist() for client in range(4)] == [[1, 3], [], [5, 9], []]


def test_ten_thousand_clients_pickle_as_two_arrays():
    shards = Shards.per_owner(np.arange(60_000), np.arange(60_000) % 10_000, 10_000)
    # 60,000 + 10,001 numbers of 8 bytes, and less than a kilobyte around them.
    assert 0 <= len(pickle.dumps(shards, protocol=5)) - 8 * 70_001 < 1024


@pytest.mark.parametrize(("count", "clients"), [(7, 3), (9, 3), (2, 5), (0, 2)])
def test_even_parts_are_those_of_array_split(count: int, clients: int):
    given = np.random.default_rng(0).permutation(count)
    shards = Shards.even(given, clients)
    assert [shards[client].tolist() for client in range(clients)] == [
        part.tolist() for part in np.array_split(given, clients)
    ]


def test_some_clients_in_another_order():
    shards = Shards.of([np.array([4, 2]), np.array([], np.int64), np.array([7]), np.array([1, 0])])
    some = shards.of_clients(np.array([3, 1, 0]))
    assert [some[client].tolist() for client in range(3)] == [[1, 0], [], [4, 2]]


def test_hold_out_cuts_the_nearest_whole_number_from_each_client():
    held = partition_of([10, 3, 14]).hold_out(0.2, 0.25, generator(0))
    # 0.2 * (10, 3, 14) = 2, 0.6, 2.8 and 0.25 * (10, 3, 14) = 2.5, 0.75, 3.5; halves go up.
    assert held.validation.sizes.tolist() == [2, 1, 3]
    assert held.heldout.sizes.tolist() == [3, 1, 4]
    assert held.train.sizes.tolist() == [5, 1, 7]
    runs = [range(10), range(10, 13), range(13, 27)]
    for client, run in enumerate(runs):
        parts = [held.split(name)[client] for name in ("train", "validation", "heldout")]
        assert sorted(np.concatenate(parts).tolist()) == list(run)
    assert held.test is not None
    assert np.array_equal(held.test.indices, np.arange(27))


def test_hold_out_takes_at_least_one_sample_when_asked_and_none_otherwise():
    held = partition_of([3, 40]).hold_out(0.01, 0.0, generator(0))
    assert held.validation.sizes.tolist() == [1, 1]
    assert held.heldout.sizes.tolist() == [0, 0]


def test_hold_out_is_random_and_seeded():
    first, again, other = (partition_of([50]).hold_out(0.5, 0.0, generator(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first.validation[0], again.validation[0])
    assert not np.array_equal(first.validation[0], other.validation[0])


def test_hold_out_names_the_client_that_would_keep_nothing():
    with refused(names=["client 1", "2 train examples", "validation_ratio=0.3", "heldout_ratio=0.3"]):
        partition_of([5, 2, 1]).hold_out(0.3, 0.3, generator(0))


def test_an_unknown_split_is_named():
    with pytest.raises(KeyError, match="dev"):
        partition_of([5]).split("dev")
