"""FedSplit against Algorithm 1 in numpy, its invariant, and its fixed point with exact proximal steps."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.quantize import QSGD
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, start
from tests.methods.averaging import ABSENCES, ENGINES, made, optima, rate, train_batches, wells
from tests.methods.own_models import personal
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.1, "batch_size": 2, "prox_step": 0.7}


def split(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """x and all z_i [4, 10] after every round."""
    hyper = here.method.hyper.model_dump()
    x, z, seen = start(here), np.tile(start(here), (4, 1)), []
    for round in range(here.rounds):
        for i in with_status(here.population.sample_round(round), "delivered"):
            u = 2 * x - z[i]
            y, velocity = u.copy(), 0.0
            for batch in train_batches(here, round, i):
                slope = batch.gradient(y) + (y - u) / hyper["prox_step"] + hyper["weight_decay"] * y
                velocity = hyper["momentum"] * velocity + slope
                y = y - rate(here, round) * velocity
            z[i] = z[i] + 2 * (y - x)
        x = z.mean(axis=0)
        seen.append((x, z.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{}, {"epochs": 2, "momentum": 0.5, "weight_decay": 0.1, "lr_decay": 0.9, "prox_step": 2.0}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_algorithm_1(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedsplit", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    for run_state, (x, z) in zip(play(here)[1], split(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        assert_close(personal(here, run_state, "centre"), z)
    assert np.abs(x - start(here)).max() > 0.1


def test_with_exact_proximal_steps_it_reaches_the_minimiser():
    here = made("fedsplit", {"lr": 0.3, "steps": 60, "batch_size": 0, "prox_step": 1.0}, rounds=40)
    curvatures, centres = wells(here)
    x = flat(play(here)[1][-1].server["params"])
    np.testing.assert_allclose(x, optima(curvatures, centres, np.ones(4)), atol=2e-5)


def test_with_a_lossy_uplink_the_model_stays_the_mean_of_the_centres():
    here = made("fedsplit", HYPER, rounds=5, clients={"per_round": 3}, uplink=QSGD(levels=4))
    for run_state in play(here)[1]:
        assert_close(flat(run_state.server["params"]), personal(here, run_state, "centre").mean(axis=0), 3e-6)
