"""Silent rounds still move x."""

from itertools import pairwise

import numpy as np

from rayfl.methods.compressed.lag import LAG
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import setup
from tests.contracts.seams.ways import Way

ROUNDS = 12


def expected(setup: Setup, lr: float, threshold: float) -> tuple[list[np.ndarray], list[int]]:
    """x after every round, and how many uploaded: k is the round, M the number of clients, and f their mean."""
    clients = [points(setup, client) for client in range(4)]
    path, sent, models, counts = [start(setup)], [np.zeros(10)] * 4, [], []
    for _ in range(ROUNDS):
        x = path[-1]
        steps = [float(((b - a) ** 2).sum()) for a, b in pairwise(path)][-10:]
        count = 0
        for i, client in enumerate(clients):
            gradient = client.gradient(x)
            if ((gradient - sent[i]) ** 2).sum() > threshold * sum(steps) / lr**2:
                sent[i], count = gradient, count + 1
        path.append(x - lr * np.mean(sent, axis=0))
        models.append(path[-1])
        counts.append(count)
    return models, counts


def test_lag_follows_its_equations(way: Way):
    here = setup(LAG, rounds=ROUNDS, engine=way.engine, hyper={"lr": 0.3, "threshold": 0.1})
    models, counts = expected(here, 0.3, 0.1)
    records, run_states = play(here, way.executor(here))
    assert [record.row.delivered for record in records] == counts
    # 10 entries of 4 bytes from each that uploads, nothing from the silent.
    assert [record.row.uplink_bits for record in records] == [320 * count for count in counts]
    np.testing.assert_allclose(
        [flat(run_state.server["params"]) for run_state in run_states], models, rtol=1e-5, atol=1e-6
    )


def test_x_moves_in_a_round_in_which_everyone_is_silent(way: Way):
    here = setup(LAG, rounds=ROUNDS, engine=way.engine, hyper={"lr": 0.3, "threshold": 0.1})
    models, counts = expected(here, 0.3, 0.1)
    silent = counts.index(0)
    assert np.abs(models[silent] - models[silent - 1]).max() > 1e-4
    records, _ = play(here, way.executor(here))
    assert {client.status for client in records[silent].clients} == {"silent"}
