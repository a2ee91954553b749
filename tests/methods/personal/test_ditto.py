"""Ditto on quadratics: FedAvg's global model, and personal models beside it in numpy and in closed form."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.methods.personal.ditto import Ditto
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, Server, assert_follows, followed, made, wells
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "lr_decay": 0.8, "epochs": 2, "batch_size": 2, "lam": 0.7, "personal_lr": 0.3}


def personal(here: Setup, path: list[np.ndarray], pull: str) -> list[np.ndarray]:
    """All v_i [4, 10] after every round; `path` is x after every round."""
    lam, v, seen = 0.7, np.stack([start(here)] * 4), []
    for round, x in enumerate([start(here), *path[:-1]]):
        lr = 0.3 * 0.8**round
        for i in with_status(here.population.sample_round(round), "delivered"):
            for batch in batches(here, round, i, "personal", epochs=3, batch_size=2):
                if pull == "joint":
                    v[i] = v[i] - lr * (batch.gradient(v[i]) + lam * (v[i] - x))
                else:
                    v[i] = v[i] - lr * batch.gradient(v[i])
                    v[i] = v[i] - lr * lam * (v[i] - x)
        seen.append(v.copy())
    return seen


def held(here: Setup, run_state: Any) -> np.ndarray:
    """All v_i [4, 10]; of a client that has no state yet the common start."""
    executor = InlineExecutor(here)
    states = {client: tree.to_tensors(executor.get(ref)) for client, ref in run_state.states.items()}
    return np.stack([flat(states[i]["params"]) if i in states else start(here) for i in range(4)])


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("pull", ["joint", "after"])
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, pull: str, clients: dict[str, Any]):
    here = made("ditto", {**HYPER, "pull": pull}, rounds=5, engine=engine, clients=clients)
    records, run_states = play(here)
    path = followed(here, Server())
    assert_follows(run_states, path)
    expected = personal(here, path, pull)
    for run_state, v in zip(run_states, expected, strict=True):
        np.testing.assert_allclose(held(here, run_state), v, rtol=1e-4, atol=1e-5)
    assert np.abs(expected[-1] - path[-1]).max() > 0.1
    # Down x, up delta and a number of examples: FedAvg's wires.
    for record in records:
        assert record.row.uplink_bits == (320 + 64) * record.row.delivered


@pytest.mark.parametrize("pull", ["joint", "after"])
def test_many_steps_end_between_the_own_optimum_and_the_global_model(pull: str):
    """One round on full batches, where a step is affine: v -> fixed + rate (v - fixed), from v = x_0.

    joint: v - lr (h (v - c) + lam (v - x)) has rate 1 - lr (h + lam) and the fixed point (h c + lam x) / (h + lam).
    after: (1 - lr lam) (v - lr h (v - c)) + lr lam x has rate r = (1 - lr lam) (1 - lr h), and
    fixed (1 - r) = (1 - lr lam) lr h c + lr lam x.
    """
    lr, lam, steps = 0.1, 2.0, 7
    hyper = {"lr": lr, "lam": lam, "batch_size": 0, "personal_steps": steps, "steps": 1, "pull": pull}
    here = made("ditto", hyper, rounds=1)
    h, c = wells(here)
    x = start(here)
    rate, fixed = 1 - lr * (h + lam), (h * c + lam * x) / (h + lam)
    if pull == "after":
        rate = (1 - lr * lam) * (1 - lr * h)
        fixed = ((1 - lr * lam) * lr * h * c + lr * lam * x) / (1 - rate)
    np.testing.assert_allclose(held(here, play(here)[1][0]), fixed + rate**steps * (x - fixed), rtol=1e-5, atol=1e-6)


def test_without_a_pull_the_personal_model_is_trained_alone():
    shared = {"lr": 0.1, "batch_size": 0, "momentum": 0.5, "weight_decay": 0.01}
    ditto = made("ditto", {**shared, "lam": 0.0, "steps": 2, "personal_steps": 4}, rounds=3)
    local = made("local", {**shared, "steps": 4}, rounds=3)
    np.testing.assert_array_equal(held(ditto, play(ditto)[1][-1]), held(local, play(local)[1][-1]))


def test_the_personal_model_is_evaluated():
    here = made("ditto", HYPER, rounds=2, clients={"per_round": 2}, evaluation=Evaluation(pooled=False))
    records, run_states = play(here)
    before, after = (held(here, run_state) for run_state in run_states)
    trained = set(here.population.sample_round(1).selected)
    for name, models in (("own/loss", after), ("own_after_training/loss", after)):
        measured = {m.client: m.value for m in records[1].metrics if m.name == name and m.client in range(4)}
        assert set(measured) == (set(range(4)) if name == "own/loss" else trained)
        for client, value in measured.items():
            assert client is not None
            assert value == pytest.approx(points(here, client, "test").loss(models[client]), rel=1e-4)
    assert all(np.array_equal(before[i], after[i]) == (i not in trained) for i in range(4))


def test_the_amounts_of_work_are_dis_pfls_by_default():
    assert [stage.epochs for stage in Ditto().plan(0, 0.0).stages] == [2, 3]
    assert Ditto().hyper.model_dump()["lam"] == 0.5
    stages = Ditto(steps=4, personal_steps=6, personal_lr=0.2, lr=0.1, lr_decay=0.5).plan(1, 0.0).stages
    assert [(stage.epochs, stage.steps) for stage in stages] == [(None, 4), (None, 6)]
    assert [stage.lr for stage in stages] == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"personal_epochs": 1, "personal_steps": 2}, ["personal_epochs=1", "personal_steps=2", "both"]),
        ({"lam": 20.0}, ["lam=20.0", "lr=0.05", "below 1"]),
        ({"lam": 0.6, "lr": 1.0, "lr_schedule": "cosine-literal"}, ["lam=0.6", "lr=1.0", "1.2", "cosine-literal"]),
        ({"lam": 3.0, "personal_lr": 0.5}, ["lam=3.0", "personal_lr=0.5", "1.5", "below 1"]),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], names: list[str]):
    with refused(names=names):
        Ditto.Hyper(**settings)
