"""What holds for every partition scheme that the registry finds."""

import numpy as np
import pytest

from rayfl.choices.kinds import named
from rayfl.data.partition import Partition, PartitionScheme
from rayfl.data.partitions.dirichlet import DirichletClass
from rayfl.data.partitions.from_file import PartitionFile
from rayfl.data.partitions.labels import LabelsPerClient, LambdaRatio
from rayfl.data.sources.synthetic import Synthetic
from rayfl.determinism.seeding import generator
from rayfl.experiment import prepare
from rayfl.experiment.experiment import Experiment
from tests.refusals import refused

OPTIONS = {LambdaRatio: {"ratio": 0.5}, LabelsPerClient: {"labels_per_client": 3}, DirichletClass: {"min_samples": 1}}
SCHEMES = [scheme for scheme in named(PartitionScheme).values() if scheme is not PartitionFile]
USE_EVERYTHING = ("iid", "lambda-ratio", "dirichlet-client", "dirichlet-class", "dirichlet-sizes", "shared-groups")
DATASET = Synthetic(num_groups=8, samples_per_group=50, num_classes=4, dim=5).load()


def make_partition(scheme: type[PartitionScheme], seed: int = 0, num_clients: int = 8) -> Partition:
    return scheme(**OPTIONS.get(scheme, {})).split(DATASET, num_clients, generator(seed, purpose="partition"))


def test_all_schemes_of_the_specification_are_found():
    assert set(named(PartitionScheme)) >= {*USE_EVERYTHING, "pathological", "labels-per-client", "natural"}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_train_samples_belong_to_one_client_and_exist(scheme):
    partition = make_partition(scheme)
    indices = partition.train.indices
    assert indices.dtype == np.int64
    assert len(np.unique(indices)) == len(indices)
    assert indices.min() >= 0
    assert indices.max() < len(DATASET.train)
    assert len(partition.train) == len(partition.validation) == len(partition.heldout) == len(partition.test) == 8
    assert partition.validation.sizes.sum() == partition.heldout.sizes.sum() == 0
    assert partition.train.sizes.min() >= 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_client_has_its_own_test_samples_each_once(scheme):
    partition = make_partition(scheme)
    for client in range(8):
        indices = partition.test[client]
        assert len(np.unique(indices)) == len(indices)
        assert np.all((indices >= 0) & (indices < len(DATASET.test)))
    # Synthetic holds back one example in ten of 8 groups of 50: 40 test examples for 8 clients.
    assert partition.test.sizes.sum() >= 8


@pytest.mark.parametrize("name", USE_EVERYTHING)
def test_schemes_that_use_every_train_sample(name):
    (scheme,) = (scheme for scheme in SCHEMES if scheme.name == name)
    assert np.array_equal(np.sort(make_partition(scheme).train.indices), np.arange(len(DATASET.train)))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_generator_decides(scheme):
    first, again, other = make_partition(scheme), make_partition(scheme), make_partition(scheme, seed=1)
    for split in ("train", "test"):
        assert np.array_equal(first.split(split).indices, again.split(split).indices)
        assert np.array_equal(first.split(split).offsets, again.split(split).offsets)
    is_drawn = scheme.name != "natural"  # with as many clients as groups nothing is left to chance
    assert is_drawn != np.array_equal(first.train.indices, other.train.indices)


def test_more_clients_than_samples_are_refused_with_one_sentence():
    experiment = Experiment(
        rounds=1, data="digits", partition="iid", clients={"count": 2000}, model="logistic", method="fedavg"
    )
    with refused(names=["clients.count=2000", "1437 train examples", "digits"]):
        prepare.split_data(experiment, experiment.data.load())
