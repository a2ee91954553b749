"""FSVRG against Algorithms 3 and 4 (without S_k and A) in numpy, and a lost gradient."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, optima, rate, share, train_batches, wells
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.5, "batch_size": 2}


def reduced(here: Setup) -> list[np.ndarray]:
    """x after every round."""
    hyper, x, full, seen = here.method.hyper.model_dump(), start(here), None, []
    decay = hyper["weight_decay"]
    for round in range(here.rounds):
        delivered = with_status(here.population.sample_round(round), "delivered")
        weights = [share(here, i) for i in delivered]
        if delivered and round % 2 == 0:
            full = np.average([points(here, i).gradient(x) + decay * x for i in delivered], axis=0, weights=weights)
        elif delivered and full is not None:
            ends = []
            for i in delivered:
                w, stream = x, train_batches(here, round, i)
                h = rate(here, round) / (len(stream) if hyper["scaled_steps"] else 1)
                for batch in stream:
                    w = w - h * (batch.gradient(w) + decay * w - batch.gradient(x) - decay * x + full)
                ends.append(w)
            x, full = np.average(ends, axis=0, weights=weights), None
        seen.append(x)
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"scaled_steps": False, "lr": 0.1, "epochs": 2, "weighting": "uniform", "weight_decay": 0.2, "lr_decay": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fsvrg", {**HYPER, **hyper}, rounds=8, engine=engine, clients=clients)
    records, run_states = play(here)
    expected = reduced(here)
    for run_state, x in zip(run_states, expected, strict=True):
        assert_close(flat(run_state.server["params"]), x)
    assert np.abs(expected[-1] - start(here)).max() > 0.05
    if not clients:
        # The model down and a gradient up; then model and gradient down, and a change up.
        weights = 64 if here.method.hyper.model_dump()["weighting"] == "samples" else 0
        bits = [{(row.uplink_bits, row.downlink_bits) for row in record.clients} for record in records]
        assert bits == [{(320 + weights, 320)}, {(320 + weights, 640)}] * 4


def test_reaches_the_minimiser_with_minibatches():
    """At the minimiser G is 0 and both gradients of a batch agree, so that noise vanishes, as in no run of FedAvg."""
    here = made("fsvrg", {**HYPER, "weighting": "uniform", "batch_size": 1}, rounds=60)
    curvatures, centres = wells(here)
    best = optima(curvatures, centres, np.ones(4))
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), best, atol=1e-4)
