"""Masks compared pair by pair beside labels, train accuracy, means by retention ratio and variances, by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.experiment.prepare import prepare
from rayfl.metrics.masks import (
    CORRELATION,
    FILTERS,
    HAMMING,
    SIMILARITY,
    client_mask,
    compared,
    hamming,
    label_similarity,
    mask_bits,
)
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.every_method import experiment
from tests.methods.reference import played, setup_of
from tests.refusals import refused
from tests.rounds.test_evaluation import by_numpy


def last_round(name: str, **options: Any) -> tuple[Setup, RoundRecord, Any]:
    here = prepare(experiment(name, rounds=2, **options))
    records, states = play(here)
    return here, records[-1], states[-1]


def of_clients(record: RoundRecord, name: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for metric in record.metrics:
        if metric.name == name and metric.client is not None and metric.value is not None:
            found.setdefault(metric.client, []).append(metric.value)
    return found


def test_the_distance_is_the_share_of_entries_that_differ():
    one = {"a": torch.tensor([True, True, False]), "b": torch.ones(7, dtype=torch.bool)}
    other = {"a": torch.tensor([False, True, False]), "b": torch.tensor([True] * 5 + [False] * 2)}
    found = hamming([mask_bits(one), mask_bits(other), mask_bits(one)])
    assert found.tolist() == [[0.0, 0.3, 0.0], [0.3, 0.0, 0.3], [0.0, 0.3, 0.0]]


def test_the_share_of_filters_is_of_the_first_convolution():
    first = torch.zeros(4, 1, 2, 2, dtype=torch.bool)
    first[0, 0, 0, 0] = first[2] = True
    mask = {"conv": first, "next": torch.ones(2, 4, 1, 1, dtype=torch.bool), "fc": torch.ones(3, 2, dtype=torch.bool)}
    thinner = mask | {"conv": first & False}
    pairs, _ = compared([client_mask(mask), client_mask(thinner)], None)
    assert pairs[FILTERS].tolist() == [[0.5], [0.0]]
    assert FILTERS not in compared([client_mask({"fc": mask["fc"]})] * 2, None)[0], "no convolution, no filters"


def test_the_similarity_is_the_cosine_of_label_distributions():
    found = label_similarity(np.array([[3, 4, 0], [6, 8, 0], [0, 0, 5], [4, 3, 0], [0, 0, 0]]))
    expected = [[1, 1, 0, 0.96, 0], [1, 1, 0, 0.96, 0], [0, 0, 1, 0, 0], [0.96, 0.96, 0, 1, 0], [0] * 5]
    assert found == pytest.approx(np.array(expected), abs=1e-12)


@pytest.mark.parametrize("name", ["dispfl", "subfedavg"])
def test_pairs_are_recorded_after_the_last_round(name: str):
    clients = {"per_round": 3} if name == "subfedavg" else {}
    here, record, state = last_round(name, evaluation={"every": 1, "masks": True}, clients=clients)
    masks = []
    for client in range(here.num_clients):
        seen = client in state.states
        kept = tree.to_tensors(state.states[client]) if seen else here.first_state(client)
        masks.append(tree.vector(kept["mask"]).numpy())
    found = of_clients(record, HAMMING)
    for client in range(here.num_clients):
        others = [other for other in range(here.num_clients) if other != client]
        assert found[client] == [float((masks[client] ^ masks[other]).mean()) for other in others]
    distances = np.array([found[client] for client in range(here.num_clients)]).ravel()
    labels = of_clients(record, SIMILARITY)
    alike = np.array([labels[client] for client in range(here.num_clients)]).ravel()
    assert record.means[HAMMING] == pytest.approx(distances.mean())
    if name == "dispfl":
        assert record.means[CORRELATION] == pytest.approx(np.corrcoef(distances, alike)[0, 1])


def test_a_method_without_masks_is_refused():
    with refused(names=["FedAvg", "keep none"]):
        prepare(experiment("fedavg", evaluation={"masks": True}))


def test_groups_of_one_retention_ratio_have_means():
    _, record, _ = last_round("dispfl", clients={"retention_ratio": [0.2, 0.5]}, evaluation={"every": 1})
    for where in ("own", "own_after_training"):
        values = {client: found[0] for client, found in of_clients(record, f"{where}/accuracy").items()}
        for ratio, group in ((0.2, [0, 2, 4]), (0.5, [1, 3, 5])):
            expected = np.mean([values[client] for client in group])
            assert record.means[f"{where}/accuracy_at_retention_{ratio}"] == pytest.approx(expected)


def test_one_ratio_makes_no_groups():
    _, record, _ = last_round("dispfl", clients={"retention_ratio": 0.5}, evaluation={"every": 1})
    assert not [name for name in record.means if "retention" in name]


def test_fedpse_records_the_variance_of_its_distances():
    _, record, _ = last_round("fedpse", clients={"per_round": 4})
    distances = [value for found in of_clients(record, "correlation_distance").values() for value in found]
    assert len(distances) == 4 and np.ptp(distances) > 0
    assert record.means["correlation_distance_variance"] == pytest.approx(np.var(distances))


def test_train_accuracy():
    setup = setup_of("fedavg", {"lr": 0.5, "batch_size": 0}, rounds=2)
    object.__setattr__(setup, "evaluation", Evaluation(every=0, train=True))
    record, state = played(setup)[-1]
    params = {name: value.numpy().astype(np.float64) for name, value in state.server["params"].items()}
    dataset = setup.dataset
    object.__setattr__(dataset, "test", dataset.train)
    loss, accuracy = by_numpy(setup, params, slice(None))
    assert record.means["pooled_train/accuracy"] == accuracy
    assert record.means["pooled_train/loss"] == pytest.approx(loss, rel=1e-5)
    assert set(of_clients(record, "own_train_after_training/accuracy")) == set(range(5))
    assert "own_train/accuracy" not in record.means, "there are no personal models"


def test_personal_models_are_evaluated_on_what_they_train_on():
    setup = setup_of("local", {"lr": 0.5, "batch_size": 0}, rounds=1)
    object.__setattr__(setup, "evaluation", Evaluation(every=0, own=False, pooled=False, train=True))
    record, state = played(setup)[-1]
    object.__setattr__(setup.dataset, "test", setup.dataset.train)
    for client, (found,) in of_clients(record, "own_train/accuracy").items():
        params = {name: value.astype(np.float64) for name, value in state.states[client]["params"].items()}
        assert found == by_numpy(setup, params, setup.partition.train[client])[1]
