"""FedDisco against its equations in float64, and its weights in cases that can be worked out on paper."""

import math
from typing import Any

import numpy as np
import pytest

from rayfl.methods.server.feddisco import FedDisco
from tests.methods.reference import initial, played, setup_of, trained
from tests.population.statuses import with_status


def shares(counts: np.ndarray, a: float, b: float, distance: str) -> np.ndarray:
    """The paper's weights, client by client."""
    p = [row / row.sum() for row in counts]
    q = 1 / len(counts[0])
    if distance == "kl":
        d = [sum(share * math.log(share / q) for share in row if share) for row in p]
    else:
        d = [math.sqrt(sum((share - q) ** 2 for share in row)) for row in p]
    raw = [max(0.0, row.sum() / counts.sum() - a * far + b) for row, far in zip(counts, d, strict=True)]
    return np.array(raw) / sum(raw)


@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({}, {}),
        ({"distance": "l2", "a": 0.2}, {"per_round": 4, "dropout_after_training": 0.2}),
        ({"a": 0.0, "b": 0.0, "lr_decay": 0.7, "momentum": 0.5}, {"per_round": 3, "dropout_before_download": 0.3}),
    ],
    ids=str,
)
def test_equals_the_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    setup = setup_of("feddisco", {"lr": 0.5, "batch_size": 4, **hyper}, clients=clients, rounds=4)
    settings = setup.method.hyper.model_dump()
    labels = setup.dataset.train.labels
    params = initial(setup)
    for round, (record, run_state) in enumerate(played(setup)):
        delivered = with_status(setup.population.sample_round(round), "delivered")
        rows = [labels[setup.partition.train[client]] for client in delivered]
        counts = np.array([[(row == label).sum() for label in range(3)] for row in rows])
        weights = shares(counts, settings["a"], settings["b"], settings["distance"])
        ends = [trained(setup, round, client, params)[0] for client in delivered]
        for name, before in params.items():
            moved = sum(weight * (before - end[name]) for weight, end in zip(weights, ends, strict=True))
            params = {**params, name: before - moved}
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), params[name], rtol=1e-4, atol=1e-5)
        assert record.means["feddisco/largest_weight"] == pytest.approx(max(weights))


@pytest.mark.parametrize(
    ("hyper", "counts", "wanted"),
    [
        # Equal sizes: 1/2 - 0.5 log 2 + 0.1 and 1/2 + 0.1.
        ({}, [[8, 0], [4, 4]], [0.6 - 0.5 * math.log(2), 0.6]),
        # ||(1, 0) - (1/2, 1/2)|| = 1 / sqrt 2.
        ({"distance": "l2", "a": 0.2, "b": 0.0}, [[6, 0], [1, 1]], [0.75 - 0.2 / math.sqrt(2), 0.25]),
        # All are below 0: as many examples as they have.
        ({"a": 9.0}, [[6, 0], [0, 2]], [0.75, 0.25]),
        ({"a": 0.0, "b": 0.0}, [[6, 0], [1, 1]], [0.75, 0.25]),
    ],
    ids=str,
)
def test_weights_on_paper(hyper: dict[str, Any], counts: list[list[int]], wanted: list[float]):
    assert FedDisco(**hyper).weights(np.array(counts)) == pytest.approx(np.array(wanted) / sum(wanted))
