"""Three batches a step, Hessian-vector products, and an adaptation step before a model is evaluated."""

import numpy as np
import pytest

from rayfl.rounds.setup import Evaluation, Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import Points, batches, flat, points, start
from tests.contracts.seams.per_fedavg import PerFedAvg
from tests.contracts.seams.quadratic import TRAIN, setup
from tests.contracts.seams.ways import Way

ALPHA, BETA = 0.2, 0.15
HYPER = {"adaptation_lr": ALPHA, "lr": BETA, "steps": 3, "batch_size": 2, "weighting": "samples"}


def step(w: np.ndarray, first: Points, second: Points, third: Points) -> np.ndarray:
    """One step with H = diag(h)."""
    outer = second.gradient(w - ALPHA * first.gradient(w))
    return w - BETA * (1 - ALPHA * third.hessian()) * outer


def expected(setup: Setup, rounds: int) -> list[np.ndarray]:
    x, models = start(setup), []
    for round in range(rounds):
        trained = []
        for client in range(4):
            # Three batches of 2 samples a step; client 0 has 7 samples, so batches of 1 sample are among them.
            stream = batches(setup, round, client, steps=9, batch_size=2)
            w = x
            for i in range(0, 9, 3):
                w = step(w, *stream[i : i + 3])
            trained.append(w)
        x = np.average(trained, axis=0, weights=TRAIN)
        models.append(x)
    return models


def test_per_fedavg_follows_its_equations(way: Way):
    here = setup(PerFedAvg, rounds=4, engine=way.engine, hyper=HYPER)
    records, run_states = play(here, way.executor(here))
    np.testing.assert_allclose(
        [flat(run_state.server["params"]) for run_state in run_states], expected(here, 4), rtol=1e-5, atol=1e-6
    )
    # 3 steps of 3 batches of 2 samples, of which some are the last one of an odd split.
    assert [client.num_steps for client in records[0].clients] == [3] * 4


@pytest.mark.parametrize("split", ["own", "own_after_training"])
def test_the_model_evaluated_is_one_adaptation_step_away(way: Way, split: str):
    here = setup(PerFedAvg, rounds=3, engine=way.engine, hyper=HYPER, evaluation=Evaluation(pooled=False))
    records, run_states = play(here, way.executor(here))
    measured = {m.client: m.value for m in records[-1].metrics if m.name == f"{split}/loss" and m.client is not None}
    received, x = (flat(run_state.server["params"]) for run_state in run_states[-2:])
    for client in range(4):
        mine = points(here, client)
        if split == "own_after_training":
            stream = batches(here, 2, client, steps=9, batch_size=2)
            x = received
            for i in range(0, 9, 3):
                x = step(x, *stream[i : i + 3])
        adapted = x - ALPHA * mine.gradient(x)
        assert measured[client] == pytest.approx(points(here, client, "test").loss(adapted), rel=1e-5)
