"""FedACG against its equations in numpy, and Nesterov's method as one of its cases."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.1, "batch_size": 2}


def accelerated(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """x and m after every round."""
    hyper, x, m, seen = here.method.hyper.model_dump(), start(here), np.zeros(10), []
    for round in range(here.rounds):
        delivered, y0, ends = with_status(here.population.sample_round(round), "delivered"), x + hyper["lam"] * m, []
        for i in delivered:
            y = y0
            for batch in train_batches(here, round, i):
                y = y - rate(here, round) * (batch.gradient(y) + hyper["beta"] * (y - y0))
            ends.append(y)
        if ends:
            mean = np.average(ends, axis=0, weights=[share(here, i) for i in delivered])
            m = hyper["lam"] * m + mean - y0
            x = x + m
        seen.append((x, m))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"beta": 0.4}, {"lam": 0.5, "beta": 1.5, "epochs": 2, "weighting": "samples", "lr_decay": 0.8}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedacg", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    for run_state, (x, m) in zip(play(here)[1], accelerated(here), strict=True):
        # m is a sum of changes of x, so its rounding is that of x.
        assert_close([flat(run_state.server[name]) for name in ("params", "momentum")], [x, m])
        assert_close(flat(here.server_half.model(run_state.server)), x)


def test_without_momentum_and_penalty_it_is_fedavg():
    ends = [
        flat(play(made(name, {**HYPER, "weighting": "uniform", **hyper}))[1][-1].server["params"])
        for name, hyper in (("fedavg", {}), ("fedacg", {"lam": 0.0, "beta": 0.0}))
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-6)


def test_one_full_batch_step_is_nesterovs_whatever_beta_is():
    """v <- lam v - eta grad f(x + lam v), x <- x + v, of the mean of the f_i."""
    here = made("fedacg", {"lr": 0.3, "steps": 1, "batch_size": 0, "lam": 0.6, "beta": 5.0}, rounds=6)
    x, v, run_states = start(here), np.zeros(10), play(here)[1]
    for run_state in run_states:
        gradients = [points(here, i).gradient(x + 0.6 * v) for i in range(4)]
        v = 0.6 * v - 0.3 * np.mean(gradients, axis=0)
        x = x + v
        assert_close(flat(run_state.server["params"]), x)
