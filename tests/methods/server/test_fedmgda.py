"""FedMGDA+ against its equations in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.determinism import seeding
from rayfl.gather import Aggregate, Collect, Handle
from rayfl.methods.server.fedmgda import FedMGDA
from rayfl.tree import Tree
from tests.methods.reference import SIZES, Vectors, doubles, initial, played, setup_of, trained
from tests.population.statuses import with_status

P = 6 * 3 + 3
HYPER = {"lr": 0.5, "batch_size": 4}


def flat(params: Vectors) -> np.ndarray:
    return np.concatenate([value.ravel() for value in params.values()])


def frank_wolfe(vectors: np.ndarray, low: float, high: float) -> np.ndarray:
    """lambda by pairwise steps between the entry that costs most and the one that costs least, 20,000 times."""
    products, weights = vectors @ vectors.T, np.full(len(vectors), 1 / len(vectors))
    for _ in range(20_000):
        gradient = products @ weights
        give = np.where(weights > low, gradient, -np.inf).argmax()
        take = np.where(weights < high, gradient, np.inf).argmin()
        if gradient[give] - gradient[take] < 1e-14:
            break
        curvature = products[give, give] + products[take, take] - 2 * products[give, take]
        step = min((gradient[give] - gradient[take]) / curvature, weights[give] - low, high - weights[take])
        weights[give] -= step
        weights[take] += step
    return weights


@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({}, {}),
        ({"epsilon": 0.0, "server_lr": 0.5}, {}),
        ({"epsilon": 1.0, "server_lr": 0.3, "server_lr_decay": 0.5}, {}),
        ({"epsilon": 0.05, "lr_decay": 0.7, "momentum": 0.5}, {"per_round": 4, "dropout_after_training": 0.2}),
    ],
    ids=str,
)
def test_equals_the_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    setup = setup_of("fedmgda", {**HYPER, **hyper}, clients=clients, rounds=4)
    settings = setup.method.hyper.model_dump()
    params = initial(setup)
    spread = 0.0
    for round, (record, run_state) in enumerate(played(setup)):
        delivered = with_status(setup.population.sample_round(round), "delivered")
        ends = [trained(setup, round, client, params)[0] for client in delivered]
        deltas = [{name: params[name] - end[name] for name in params} for end in ends]
        lengths = [np.linalg.norm(flat(delta)) for delta in deltas]
        vectors = np.stack([flat(delta) / length for delta, length in zip(deltas, lengths, strict=True)])
        equal, epsilon = 1 / len(delivered), settings["epsilon"]
        weights = frank_wolfe(vectors, max(0.0, equal - epsilon), min(1.0, equal + epsilon))
        spread = max(spread, np.abs(weights - equal).max())
        step = settings["server_lr"] * settings["server_lr_decay"] ** round
        for weight, delta, length in zip(weights, deltas, lengths, strict=True):
            params = {name: params[name] - step * weight / length * delta[name] for name in params}
        for name, value in params.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-4, atol=1e-5)
        assert record.means["fedmgda/direction_norm"] == pytest.approx(np.linalg.norm(weights @ vectors), rel=1e-4)
    assert (spread > 0.01) == (settings["epsilon"] > 0)


def update(deltas: dict[int, list[float]], **hyper: Any) -> tuple[list[float], float]:
    """Where the server goes from 0, and the norm that it records."""
    setup = setup_of("fedmgda", hyper)
    assert isinstance(setup.method, FedMGDA)
    items: dict[int, Tree | Handle] = {client: {"x": torch.tensor(delta)} for client, delta in deltas.items()}
    ctx = setup.context(0, setup.plan(0), seeding.NOBODY, "server")
    received = {"delta": Aggregate(Collect(), weight=len(items), count=len(items), items=items)}
    state, metrics = setup.method.server_update({"params": {"x": torch.zeros(2)}}, received, list(items), ctx)
    return state["params"]["x"].tolist(), metrics["fedmgda/direction_norm"]


def test_two_clients_weigh_the_same_once_normalised():
    # (3, 0) and (0, 0.1) become (1, 0) and (0, 1), with their middle as the shortest combination.
    end, norm = update({0: [3.0, 0.0], 1: [0.0, 0.1]}, epsilon=1.0)
    np.testing.assert_allclose(end, [-0.5, -0.5], rtol=1e-6)
    assert norm == pytest.approx(np.sqrt(0.5))


def test_opposite_clients_stop_the_server():
    end, norm = update({2: [3.0, 0.0], 3: [-1.0, 0.0]})
    assert end == [0.0, 0.0]
    assert norm == pytest.approx(0.0, abs=1e-12)


def test_a_client_that_did_not_move_does_not_count():
    # Without the zero: two clients, 1/2 each. With it m = 3 and epsilon = 0 would give 1/3 each.
    assert update({0: [2.0, 0.0], 1: [0.0, 0.0], 4: [0.0, 5.0]}, epsilon=0.0)[0] == [-0.5, -0.5]
    assert update({0: [0.0, 0.0], 1: [0.0, 0.0]}) == ([0.0, 0.0], 0.0)


def test_bits_of_a_round():
    ((record, _),) = played(setup_of("fedmgda", HYPER, rounds=1))
    assert {(row.uplink_bits, row.downlink_bits) for row in record.clients} == {(32 * P, 32 * P)}
    assert len(record.clients) == len(SIZES)


def test_the_direction_lowers_every_loss_of_two_clients_in_conflict():
    # On one full-batch step the differences are gradients: along d nobody's loss rises, at the first order.
    setup = setup_of("fedmgda", {"lr": 0.01, "batch_size": 0, "epsilon": 1.0}, rounds=1)
    ((_, run_state),) = played(setup)
    start = initial(setup)
    direction = flat(start) - flat(doubles(run_state.server["params"]))
    for client in range(len(SIZES)):
        delta = flat(start) - flat(trained(setup, 0, client, start)[0])
        assert direction @ delta >= -1e-9
