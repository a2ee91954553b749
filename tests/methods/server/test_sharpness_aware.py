"""FedSAM, FedSpeed and FedLESAM against their equations in numpy, and where they are FedAvg and FedDyn."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import Points, flat, start
from tests.methods.averaging import (
    ABSENCES,
    ENGINES,
    Server,
    assert_follows,
    followed,
    made,
    rate,
    share,
    train_batches,
)
from tests.methods.own_models import personal
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.1, "batch_size": 2}


def uphill(batch: Points, y: np.ndarray, rho: float) -> np.ndarray:
    """g(y + rho g / |g|)."""
    g = batch.gradient(y)
    return batch.gradient(y + rho * g / np.sqrt((g**2).sum()))


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"rho": 0.5}, {"epochs": 2, "weighting": "uniform", "lr_decay": 0.8, "rho": 2.0}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_fedsam_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedsam", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    path = followed(here, Server(), lambda batch, y, x: uphill(batch, y, hyper["rho"]))
    assert_follows(play(here)[1], path)


def speeding(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """FedSpeed's x, and all h_i [4, 10], with h_i <- h_i + (y_i - x) and x <- mean y_i + mean h."""
    hyper, x, own, seen = here.method.hyper.model_dump(), start(here), np.zeros((4, 10)), []
    a, rho, lam = hyper["alpha"], hyper["rho"], hyper["lam"]
    for round in range(here.rounds):
        ends = []
        for i in with_status(here.population.sample_round(round), "delivered"):
            y = x
            for batch in train_batches(here, round, i):
                gradient = (1 - a) * batch.gradient(y) + a * uphill(batch, y, rho) + lam * (y - x) + lam * own[i]
                y = y - rate(here, round) * gradient
            own[i] = own[i] + y - x
            ends.append(y)
        if ends:
            x = np.mean(ends, axis=0) + own.mean(axis=0)
        seen.append((x, own.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"rho": 0.5, "lam": 0.3}, {"alpha": 0.4, "rho": 1.5, "lam": 1.2, "epochs": 2, "lr_decay": 0.8}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_fedspeed_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedspeed", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    _, run_states = play(here)
    for run_state, (x, own) in zip(run_states, speeding(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        assert_close(-personal(here, run_state, "shift"), own)


def lesam(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """FedLESAM's x, and every client's last received model [4, 10], at first the common start."""
    rho = here.method.hyper.model_dump()["rho"]
    x, last, met, seen = start(here), np.tile(start(here), (4, 1)), set[int](), []
    for round in range(here.rounds):
        delivered, ends = with_status(here.population.sample_round(round), "delivered"), []
        for i in delivered:
            y, e = x, np.zeros(10)
            if i in met and np.any(last[i] != x):
                e = rho * (last[i] - x) / np.linalg.norm(last[i] - x)
            for batch in train_batches(here, round, i):
                y = y - rate(here, round) * batch.gradient(y + e)
            ends.append(y)
        last[list(delivered)] = x
        met |= {*delivered}
        if ends:
            x = np.average(ends, axis=0, weights=[share(here, i) for i in delivered])
        seen.append((x, last.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"rho": 0.5}, {"rho": 2.0, "epochs": 2, "weighting": "uniform"}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_fedlesam_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedlesam", {**HYPER, **hyper}, rounds=6, engine=engine, clients=clients)
    for run_state, (x, last) in zip(play(here)[1], lesam(here), strict=True):
        assert_close(flat(run_state.server["params"]), x)
        assert_close(personal(here, run_state), last)


@pytest.mark.parametrize(
    ("name", "hyper", "plain", "settings"),
    [
        ("fedsam", {"rho": 0.0}, "fedavg", {}),
        ("fedlesam", {"rho": 0.0}, "fedavg", {}),
        ("fedspeed", {"rho": 0.0, "lam": 0.7}, "feddyn", {"alpha": 0.7}),
    ],
)
@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_without_a_perturbation_they_are_their_bases_to_the_bit(
    name: str, hyper: dict[str, Any], plain: str, settings: dict[str, Any], clients: dict[str, Any]
):
    shared = {**HYPER, "momentum": 0.5, "weight_decay": 0.1}
    (records, run_states), (others, other_states) = (
        play(made(kind, {**shared, **given}, rounds=5, clients=clients))
        for kind, given in ((name, hyper), (plain, settings))
    )
    assert flat(run_states[-1].server["params"]).tolist() == flat(other_states[-1].server["params"]).tolist()
    assert [r.row.uplink_bits for r in records] == [r.row.uplink_bits for r in others]
    assert [r.means.get("train/loss") for r in records] == [r.means.get("train/loss") for r in others]


@pytest.mark.parametrize(("name", "gradients"), [("fedsam", 2), ("fedspeed", 2), ("fedlesam", 1)])
def test_a_step_costs_its_gradients(name: str, gradients: int):
    here = made(name, HYPER)
    (stage,) = here.plan(0).stages
    assert here.method.gradients_per_example(stage, here.context(0, here.plan(0), 0, "client")) == gradients
