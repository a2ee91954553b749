"""VRL-SGD against Algorithm 1 in numpy, its invariant, and the minimiser that local SGD misses."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.server.vrl_sgd import VRLSGD
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, start
from tests.contracts.seams.quadratic import TRAIN
from tests.methods.averaging import ABSENCES, ENGINES, made, optima, rate, wells
from tests.methods.own_models import personal
from tests.methods.reference import assert_close
from tests.population.statuses import with_status
from tests.refusals import refused


def reduced(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """x and all Delta_i [4, 10] after every round."""
    hyper = here.method.hyper.model_dump()
    x, deviation, seen = start(here), np.zeros((4, 10)), []
    for round in range(here.rounds):
        delivered, y = [*with_status(here.population.sample_round(round), "delivered")], np.tile(x, (4, 1))
        k = 1 if hyper["warm_up"] and round == 0 else hyper["steps"]
        gamma = rate(here, round)
        for i in delivered:
            for batch in batches(here, round, i, steps=k, batch_size=hyper["batch_size"] or TRAIN[i]):
                y[i] = y[i] - gamma * (batch.gradient(y[i]) + hyper["weight_decay"] * y[i] - deviation[i])
        if delivered:
            x = y[delivered].mean(axis=0)
            deviation[delivered] += (x - y[delivered]) / (k * gamma)
        seen.append((x, deviation.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"steps": 3}, {"steps": 4, "warm_up": True, "weight_decay": 0.1, "lr_decay": 0.8}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_algorithm_1(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("vrl_sgd", {"lr": 0.1, "batch_size": 2, **hyper}, rounds=6, engine=engine, clients=clients)
    for run_state, (x, deviation) in zip(play(here)[1], reduced(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        found = personal(here, run_state, "deviation")
        # A difference of models over k gamma.
        np.testing.assert_allclose(found, deviation, rtol=0, atol=5e-6)
        np.testing.assert_allclose(found.sum(axis=0), 0, atol=2e-5)
    assert np.abs(deviation).max() > 0.1


def test_reaches_the_minimiser_with_many_local_steps():
    here = made("vrl_sgd", {"lr": 0.1, "batch_size": 0, "steps": 10}, rounds=40)
    curvatures, centres = wells(here)
    best = optima(curvatures, centres, np.ones(4))
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), best, atol=2e-5)
    local_sgd = made("fedavg", {"lr": 0.1, "batch_size": 0, "steps": 10, "weighting": "uniform"}, rounds=40)
    assert np.abs(flat(play(local_sgd)[1][-1].server["params"]) - best).max() > 1e-3


def test_without_a_warm_up_it_is_scaffnew_with_fixed_steps():
    shared = {"lr": 0.1, "batch_size": 2, "steps": 3}
    pairs = (play(made(name, shared, rounds=5))[1] for name in ("vrl_sgd", "scaffnew"))
    for ours, theirs in zip(*pairs, strict=True):
        assert_close(flat(ours.server["params"]), flat(theirs.server["params"]))


@pytest.mark.parametrize("setting", [{"epochs": 2}, {"momentum": 0.9}, {"optimizer": "adam"}], ids=str)
def test_settings_that_it_cannot_use_are_refused(setting: dict[str, Any]):
    with refused(names=[*setting]):
        VRLSGD.Hyper(**setting)
