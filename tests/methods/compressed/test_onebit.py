"""1-bit SGD against its steps in numpy."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.methods.compressed.onebit import OneBitSGD
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.reference import doubles, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status

CLIENTS = range(4)
GROUPS = (slice(0, 4), slice(4, 8), slice(8, 10))
"""The two rows of the weight [2, 4], and the bias."""


def class_means(v: np.ndarray) -> np.ndarray:
    """Every entry becomes the mean of the entries of its sign; zero counts as positive."""
    out = np.empty_like(v)
    for positive in (True, False):
        chosen = (v >= 0) == positive
        out[chosen] = v[chosen].mean() if chosen.any() else 0
    return out


def followed(here: Setup) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """x and the clients' errors [4, 10] after every round."""
    hyper = here.method.hyper.model_dump()
    weights = np.array(TRAIN if hyper["weighting"] == "samples" else (1, 1, 1, 1), np.float64)
    x, errors, path, seen = start(here), np.zeros((4, 10)), [], []
    for round in range(here.rounds):
        drawn, total = with_status(here.population.sample_round(round), "delivered"), np.zeros(10)
        for k in drawn:
            wanted = hyper["lr"] * hyper["lr_decay"] ** round * points(here, k).gradient(x)
            wanted += errors[k] if hyper["error_feedback"] else 0
            sent = np.concatenate([class_means(wanted[group]) for group in GROUPS])
            errors[k] = wanted - sent
            total += weights[k] * sent / weights[list(drawn)].sum()
        x = x - total
        path.append(x)
        seen.append(errors.copy())
    return path, seen


@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({}, {}),
        ({"lr_decay": 0.7}, {}),
        ({"error_feedback": False, "weighting": "samples"}, {}),
        ({"weighting": "samples"}, {"per_round": 3, "dropout_after_training": 0.2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_equals_the_equations(hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    here = setup(
        OneBitSGD(Quadratic(), OneBitSGD.Hyper(**{"lr": 0.2, **hyper})), rounds=8, engine=engine, clients=clients
    )
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    path, errors = followed(here)
    for run_state, x, error in zip(run_states, path, errors, strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-6)
        for k, ref in run_state.states.items():
            memory = tree.to_tensors(executor.get(ref))
            np.testing.assert_allclose(flat(memory), error[k], rtol=1e-5, atol=1e-6)
    # 8 + 2 signs in whole bytes a tensor, two means of 32 bits for each of 3 groups, and a count of examples.
    size = 16 + 3 * 64 + (64 if hyper.get("weighting") == "samples" else 0)
    sent = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in sent} == {(size, 320)}


def test_equals_the_equations_on_logistic_regression():
    here = setup_of("onebit", {"lr": 0.5}, rounds=5)
    examples, x = here.dataset.train, initial(here)
    errors = [{name: np.zeros_like(value) for name, value in x.items()} for _ in range(5)]
    for record, run_state in played(here):
        total = {name: np.zeros_like(value) for name, value in x.items()}
        for k in range(5):
            rows = here.partition.train[k]
            gradient = softmax_gradient(x, examples.inputs[rows].astype(np.float64), examples.labels[rows])
            for name in x:
                wanted = 0.5 * gradient[name] + errors[k][name]
                # One group an output unit: the rows of the weight [3, 6], and the bias as a whole.
                sent = np.stack([class_means(row) for row in wanted.reshape(-1, wanted.shape[-1])])
                sent = sent.reshape(wanted.shape)
                errors[k][name] = wanted - sent
                total[name] += sent / 5
        x = {name: x[name] - total[name] for name in x}
        for name, value in doubles(run_state.server["params"]).items():
            np.testing.assert_allclose(value, x[name], rtol=1e-4, atol=1e-5)
        assert {row.uplink_bits for row in record.clients} == {8 * 3 + 8 * 1 + 4 * 64}


@pytest.mark.slow
def test_converges_with_error_feedback_and_stalls_without():
    distances = {}
    for error_feedback in (True, False):
        here = setup(OneBitSGD(Quadratic(), OneBitSGD.Hyper(lr=0.02, error_feedback=error_feedback)), rounds=400)
        mine = [points(here, k) for k in CLIENTS]
        minimiser = np.mean([(each.a * each.c).mean(axis=0) for each in mine], axis=0)
        minimiser /= np.mean([each.hessian() for each in mine], axis=0)
        distances[error_feedback] = np.linalg.norm(flat(play(here)[1][-1].server["params"]) - minimiser)
    # What is not remembered keeps it from the minimiser for good, the clients' gradients not being zero there.
    assert distances[True] < 0.02 < 0.5 < distances[False]
