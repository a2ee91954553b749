"""DCGD against its equations in float64, on quadratics; gradient descent where nothing is compressed."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.compressed.dcgd import DCGD
from rayfl.methods.compressed.diana import DIANA
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.convex import (
    CLIENTS,
    DENSE_BITS,
    SPARSE_BITS,
    RandK,
    Softmax,
    assert_follows,
    bits,
    distances,
    draws,
    gradient,
    joined,
    prox,
    rand_k,
    softmax_setup,
)


@pytest.mark.parametrize("hyper", [{}, {"l2": 0.5, "l1": 0.1, "lr_decay": 0.9}, {"weighting": "samples"}], ids=str)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_its_equations(hyper: dict[str, Any], engine: str):
    method = DCGD(Quadratic(), DCGD.Hyper(**{"lr": 0.2, **hyper}))
    here = setup(method, rounds=6, uplink=RandK(), engine=engine)
    records, run_states = play(here)
    p = np.array(TRAIN if method.hyper.weighting == "samples" else [1] * 4, float)
    x, expected = start(here), []
    for round in range(6):
        lr = 0.2 * method.hyper.lr_decay**round
        q = [rand_k(gradient(here, i, x, method.hyper.l2), draws(here, round, i)) for i in CLIENTS]
        x = prox(x - lr * np.average(q, axis=0, weights=p), lr * method.hyper.l1)
        expected.append(x)
    assert_follows(run_states, "params", expected)
    # The number of examples takes 8 bytes.
    up = SPARSE_BITS + (64 if method.hyper.weighting == "samples" else 0)
    assert bits(records) == [{(up, DENSE_BITS)}] * 6


def test_a_minibatch_is_one_step_of_the_usual_schedule():
    here = setup(DCGD(Quadratic(), DCGD.Hyper(lr=0.2, batch_size=3)), rounds=4)
    records, run_states = play(here)
    x, expected = start(here), []
    for round in range(4):
        (each,) = zip(*(batches(here, round, i, steps=1, batch_size=3) for i in CLIENTS), strict=True)
        x = x - 0.2 * np.mean([batch.gradient(x) for batch in each], axis=0)
        expected.append(x)
    assert_follows(run_states, "params", expected)
    assert all(row.num_samples == 3 for record in records for row in record.clients)


def test_the_recorded_loss_is_the_objective_with_l2():
    here = setup(DCGD(Quadratic(), DCGD.Hyper(lr=0.2, l2=0.7)), rounds=1)
    record = play(here)[0][0]
    recorded = {metric.client: metric.value for metric in record.metrics if metric.name == "train/loss"}
    x = start(here)
    for i in CLIENTS:
        assert recorded[i] == pytest.approx(points(here, i).loss(x) + 0.35 * (x**2).sum(), rel=1e-5)


@pytest.mark.parametrize("method", [DCGD, DIANA])
def test_without_compression_it_is_gradient_descent(method: type[DCGD | DIANA]):
    here = setup(method(Quadratic(), method.Hyper(lr=0.3, l2=0.2)), rounds=40)
    records, run_states = play(here)
    x, expected = start(here), []
    for _ in range(40):
        x = x - 0.3 * np.mean([gradient(here, i, x, 0.2) for i in CLIENTS], axis=0)
        expected.append(x)
    assert_follows(run_states, "params", expected)
    assert bits(records) == [{(DENSE_BITS, DENSE_BITS)}] * 40


def test_the_proximal_step_reaches_the_sparse_minimiser():
    """Without compression 0 is in grad f(x) + l1 d||x||_1: grad_j = -l1 sign(x_j), or |grad_j| <= l1 where x_j = 0."""
    here = setup(DCGD(Quadratic(), DCGD.Hyper(lr=0.6, l1=0.6)), rounds=80)
    params = play(here)[1][-1].server["params"]
    x = np.concatenate([tensor.numpy().ravel() for tensor in params.values()]).astype(float)
    slope = np.mean([gradient(here, i, x) for i in CLIENTS], axis=0)
    zero = x == 0
    assert 0 < zero.sum() < 10
    assert (np.abs(slope[zero]) <= 0.6).all()
    np.testing.assert_allclose(slope[~zero], -0.6 * np.sign(x[~zero]), atol=1e-5)


def test_clients_that_are_away_leave_the_mean_to_the_others():
    here = setup(DCGD(Quadratic(), DCGD.Hyper(lr=0.2)), rounds=3, clients={"per_round": 2})
    _, run_states = play(here)
    x, expected = start(here), []
    for round in range(3):
        x = x - 0.2 * np.mean([gradient(here, i, x) for i in here.population.sample_round(round).selected], axis=0)
        expected.append(x)
    assert_follows(run_states, "params", expected)


def test_on_digits_from_an_experiment_gradient_descent_reaches_the_minimiser():
    tables = {"data": "digits", "partition": {"name": "dirichlet-class", "alpha": 0.3}, "clients": {"count": 5}}
    convex = Softmax(softmax_setup({"name": "dcgd"}, 1, **tables), l2=2.0)
    smoothness, minimiser = convex.smoothness(), convex.minimiser()
    here = softmax_setup({"name": "dcgd", "l2": 2.0, "lr": 1 / smoothness}, 100, **tables)
    found = distances(here, minimiser)
    # Gradient descent contracts the squared distance by 1 - mu / L or better, a round.
    begin = float(((joined(here.initial) - minimiser) ** 2).sum())
    for round in range(60):
        assert found[round] <= begin * (1 - 2.0 / smoothness) ** (round + 1)
    assert found[-1] < 1e-8 * begin
