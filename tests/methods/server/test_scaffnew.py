"""Scaffnew against its iteration in float64, its invariant, and the theorem's contraction in exact expectation."""

from typing import Any

import numpy as np
import pytest

from rayfl.determinism import seeding
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Plan
from rayfl.methods.server.scaffnew import Scaffnew
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import to_tensors
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import batches, flat, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.averaging import ENGINES, made, optima, wells
from tests.methods.own_models import CLIENTS
from tests.refusals import refused


def num_steps(coin: float, p: float) -> int:
    """The number of tosses of chance p up to the first hit: 1 - (1 - p)^K is the first of these above the coin."""
    k = 1
    while 1 - (1 - p) ** k <= coin:
        k += 1
    return k


def followed(here: Setup) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, all y_i and all h_i after every communication, by the equations; the h_i before they move."""
    hyper = here.method.hyper.model_dump()
    p = 1 / hyper["steps"] if hyper["steps"] else hyper["p"]
    x, h, seen = np.tile(start(here), (4, 1)), np.zeros((4, 10)), []
    for round in range(here.rounds):
        lr = hyper["lr"] * hyper["lr_decay"] ** round
        steps = hyper["steps"] or num_steps(seeding.coin(here.seed, round), p)
        y = x.copy()
        for i in CLIENTS:
            for batch in batches(here, round, i, steps=steps, batch_size=hyper["batch_size"] or TRAIN[i]):
                y[i] = y[i] - lr * (batch.gradient(y[i]) + hyper["weight_decay"] * y[i] - h[i])
        x = np.tile(y.mean(axis=0), (4, 1))
        seen.append((x[0], y, h))
        h = h + p / lr * (x - y)
    return seen


def shifts(here: Setup, executor: InlineExecutor, run_state: Any) -> tuple[np.ndarray, np.ndarray]:
    """All y_i and h_i in the clients' states, each [4, 10]."""
    states = [to_tensors(executor.get(run_state.states[i])) for i in CLIENTS]
    return np.stack([flat(one["params"]) for one in states]), np.stack([flat(one["shift"]) for one in states])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "hyper",
    [{"p": 0.4, "batch_size": 2}, {"p": 0.6, "batch_size": 0, "lr_decay": 0.9, "weight_decay": 0.1}, {"steps": 3}],
    ids=str,
)
def test_follows_algorithm_2(hyper: dict[str, Any], engine: str):
    here = made("scaffnew", {"lr": 0.1, **hyper}, rounds=8, engine=engine)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for record, run_state, (x, y, h) in zip(records, run_states, followed(here), strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, atol=1e-5)
        found = shifts(here, executor, run_state)
        np.testing.assert_allclose(found[0], y, atol=1e-5)
        np.testing.assert_allclose(found[1], h, atol=1e-4)
        np.testing.assert_allclose(found[1].sum(axis=0), 0, atol=1e-4)
        assert {(row.uplink_bits, row.downlink_bits) for row in record.clients} == {(320, 320)}
    assert np.abs(followed(here)[-1][2]).max() > 0.1


@pytest.mark.parametrize("p", [0.07, 0.5, 1.0])
def test_the_number_of_steps_is_geometric(p: float):
    method = Scaffnew(Quadratic(), p=p)
    coins = (np.arange(2000) + 0.5) / 2000
    found = [method.plan(0, coin).stages[0].steps for coin in coins]
    assert found == [num_steps(coin, p) for coin in coins]
    for k in (1, 2, 5):
        assert found.count(k) / 2000 == pytest.approx(p * (1 - p) ** (k - 1), abs=1e-3)


def test_with_p_1_it_is_gradient_descent():
    here = made("scaffnew", {"p": 1.0, "lr": 0.3, "batch_size": 0}, rounds=6)
    (h, c), x = wells(here), start(here)
    for run_state in play(here)[1]:
        x = x - 0.3 * (h * (x - c)).mean(axis=0)
        np.testing.assert_allclose(flat(run_state.server["params"]), x, atol=2e-6)


class Told(Scaffnew):
    """Scaffnew whose next numbers of steps are known."""

    told: tuple[int, ...] = ()

    def plan(self, round_number: int, coin: float) -> Plan:
        # A coin in the middle of those that give K: from 1 - (1 - p)^(K - 1) to 1 - (1 - p)^K.
        return super().plan(round_number, 1 - (1 - self.hyper.p) ** (self.told[round_number] - 0.5))


def test_an_iteration_contracts_in_exact_expectation():
    """E Psi+ <= max((1 - gamma mu)^2, (gamma L - 1)^2, 1 - p^2) Psi, over both sides of the coin, for
    Psi = sum ||x_i - x*||^2 + (gamma / p)^2 sum ||h_i - grad f_i(x*)||^2, in five iterations of each of four rounds."""
    curvatures, centres = wells(made("scaffnew", {}))
    largest, smallest = curvatures.max(), curvatures.min()
    gamma, p = 1 / largest, float(np.sqrt(smallest / largest) / 2)
    rate = max((1 - gamma * smallest) ** 2, (gamma * largest - 1) ** 2, 1 - p**2)
    minimiser = optima(curvatures, centres, np.ones(4))
    gradients = curvatures * (minimiser - centres)
    assert np.abs(gradients).max() > 0.5

    def psi(x: np.ndarray, h: np.ndarray) -> float:
        return ((x - minimiser) ** 2).sum() + (gamma / p) ** 2 * ((h - gradients) ** 2).sum()

    before = (3, 1, 4)
    for rounds in range(len(before) + 1):
        last, worst = None, 0.0
        for k in range(1, 6):
            method = Told(Quadratic(), lr=gamma, p=p, batch_size=0)
            method.told = (*before[:rounds], k)
            here = setup(method, rounds=rounds + 1)
            executor = InlineExecutor(here)
            run_states = play(here, executor)[1]
            y, h = shifts(here, executor, run_states[-1])
            x = np.tile(flat(run_states[-1].server["params"]), (4, 1))
            communicated, alone = psi(x, h + p / gamma * (x - y)), psi(y, h)
            if last is None:
                began = flat(run_states[-2].server["params"]) if rounds else start(here)
                last = psi(np.tile(began, (4, 1)), h)
            worst = max(worst, (p * communicated + (1 - p) * alone) / last)
            last = alone
        assert 0.3 < worst <= rate * (1 + 1e-5)


@pytest.mark.parametrize("hyper", [{"p": 0.5}, {"steps": 4}], ids=str)
def test_unlike_clients_meet_at_the_minimiser(hyper: dict[str, Any]):
    here = made("scaffnew", {"lr": 0.5, "batch_size": 0, **hyper}, rounds=80)
    executor, (curvatures, centres) = InlineExecutor(here), wells(here)
    minimiser = optima(curvatures, centres, np.ones(4))
    run_state = play(here, executor)[1][-1]
    np.testing.assert_allclose(flat(run_state.server["params"]), minimiser, atol=2e-5)
    _, h = shifts(here, executor, run_state)
    np.testing.assert_allclose(h, curvatures * (minimiser - centres), atol=1e-4)
    assert np.abs(h).max() > 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_round", 3),
        ("fraction", 0.5),
        ("deadline_s", 3.0),
        ("take_first", 3),
        ("upload_loss", 0.1),
        ("dropout_before_download", 0.1),
        ("dropout_after_download", 0.1),
        ("dropout_after_training", 0.1),
        ("availability", {"probability": 0.5}),
        ("work", "capacity"),
    ],
)
def test_what_keeps_clients_or_steps_away_is_refused(key: str, value: Any):
    with refused(names=[f"clients.{key}", "Scaffnew", "every client", "remove"]):
        made("scaffnew", {}, clients={key: value})


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"wrap": ["clip"]}, ["wrap", "clip", "own way"]),
        # With another mean than the plain one the sum of the h_i would not stay 0.
        ({"wrap": ["coordinate-median"]}, ["wrap", "coordinate-median", "the mean of all"]),
        ({"wrap": "elastic"}, ["elastic", "unchanged", "remove"]),
    ],
)
def test_what_changes_messages_is_refused(tables: dict[str, Any], names: list[str]):
    with refused(names=["Scaffnew", *names]):
        prepare(experiment("scaffnew", **tables))


@pytest.mark.parametrize(
    "given",
    [{"epochs": 2}, {"momentum": 0.5}, {"optimizer": "adam"}, {"clip_norm": 1.0}, {"p": 0.5, "steps": 2}],
    ids=str,
)
def test_other_steps_are_refused(given: dict[str, Any]):
    with refused(names=[f"method.{next(iter(given))}", "does nothing", "remove"]):
        experiment("scaffnew", method={"name": "scaffnew", **given})


def test_everyone_may_be_written_out():
    made("scaffnew", {}, clients={"per_round": 4})
