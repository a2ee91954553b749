"""FedExP against its equations in numpy, its two facts about eta_g, and the model that is evaluated."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.gather import Aggregate, WeightedMean
from rayfl.methods.server.fedexp import FedExP
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.1, "batch_size": 2}


def extrapolated(here: Setup) -> list[tuple[np.ndarray, np.ndarray, float | None]]:
    """x, the mean of the last two x, and eta_g, None if nothing arrived."""
    epsilon = here.method.hyper.model_dump()["epsilon"]
    x, previous, seen = start(here), start(here), []
    for round in range(here.rounds):
        delivered, deltas, server_lr = with_status(here.population.sample_round(round), "delivered"), [], None
        for i in delivered:
            y = x
            for batch in train_batches(here, round, i):
                y = y - rate(here, round) * batch.gradient(y)
            deltas.append(x - y)
        if deltas:
            p = np.array([share(here, i) for i in delivered])
            p = p / p.sum()
            mean = p @ np.array(deltas)
            server_lr = max(1.0, (p @ [d @ d for d in deltas]) / (2 * (mean @ mean + epsilon)))
            previous, x = x, x - server_lr * mean
        seen.append((x, (x + previous) / 2, server_lr))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"epsilon": 0.01}, {"epochs": 2, "weighting": "samples", "lr_decay": 0.8}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    options = {"rounds": 6, "engine": engine, "clients": clients, "evaluation": Evaluation()}
    here, last = (made("fedexp", {**HYPER, **hyper, "judged": judged}, **options) for judged in ("mean", "last"))
    (records, run_states), (_, other_states) = play(here), play(last)
    expected = extrapolated(here)
    for record, run_state, other, (x, mean, server_lr) in zip(records, run_states, other_states, expected, strict=True):
        # eta_g multiplies the rounding of the mean delta.
        assert_close(flat(run_state.server["params"]), x, tolerance=5e-6)
        assert record.means.get("fedexp/server_lr") == (server_lr and pytest.approx(server_lr, rel=1e-4))
        assert_close(flat(here.server_half.model(run_state.server)), mean, tolerance=5e-6)
        assert flat(last.server_half.model(other.server)).tolist() == flat(run_state.server["params"]).tolist()
    assert max(server_lr or 0 for _, _, server_lr in expected) > 1.2
    losses = {m.client: m.value for m in records[-1].metrics if m.name == "own/loss" and m.client is not None}
    assert losses == pytest.approx({i: points(here, i, "test").loss(expected[-1][1]) for i in range(4)}, rel=1e-3)


@pytest.mark.parametrize(
    ("deltas", "server_lr"),
    [(np.tile([3.0, 4.0], (4, 1)), 1.0), (2 * np.eye(6), 3.0)],
    ids=["equal deltas", "six orthogonal ones"],
)
def test_eta_g_by_hand(deltas: np.ndarray, server_lr: float):
    here = made("fedexp", {"epsilon": 1e-9})
    assert isinstance(here.method, FedExP)
    mean, square = deltas.mean(axis=0), float((deltas**2).sum(axis=1).mean())
    received = {
        "delta": Aggregate(WeightedMean(), known={"x": torch.tensor(mean)}),
        "square": Aggregate(WeightedMean(), known={"square": torch.tensor(square)}),
    }
    x = {"x": torch.zeros(len(mean), dtype=torch.float64)}
    ctx = here.context(0, here.plan(0), 0, "server")
    server, metrics = here.method.server_update({"params": x, "previous": x}, received, (0,), ctx)
    assert metrics["fedexp/server_lr"] == pytest.approx(server_lr)
    np.testing.assert_allclose(server["params"]["x"], -server_lr * mean, rtol=1e-6)


def test_with_a_large_epsilon_it_is_fedavg():
    ends = [
        flat(play(made(name, {**HYPER, "weighting": "uniform", **hyper}))[1][-1].server["params"])
        for name, hyper in (("fedavg", {}), ("fedexp", {"epsilon": 1e6}))
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-6)
