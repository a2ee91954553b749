"""FedPD against its equations in float64, and against the minimiser of heterogeneous quadratics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.server.fedpd import FedPD
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.population.statuses import with_status

CLIENTS = range(4)


def followed(method: FedPD, here: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """After every round x0, all x_i, all x0_i and all lambda_i, by the equations."""
    hyper = method.hyper
    x0 = start(here)
    x, anchor, lam = np.tile(x0, (4, 1)), np.tile(x0, (4, 1)), np.zeros((4, 10))
    seen = []
    for round in range(here.rounds):
        lr = hyper.lr * hyper.lr_decay**round
        for i in CLIENTS:
            for batch in batches(here, round, i, epochs=hyper.epochs or 1, batch_size=hyper.batch_size):
                x[i] = x[i] - lr * (batch.gradient(x[i]) + lam[i] + (x[i] - anchor[i]) / hyper.eta)
            lam[i] = lam[i] + (x[i] - anchor[i]) / hyper.eta
            anchor[i] = x[i] + hyper.eta * lam[i]
        if seeding.coin(here.seed, round) >= hyper.skip_probability:
            x0 = anchor.mean(axis=0)
            anchor[:] = x0
        seen.append((x0, x.copy(), anchor.copy(), lam.copy()))
    return seen


@pytest.mark.parametrize(
    "hyper",
    [{}, {"skip_probability": 0.5, "eta": 0.4, "epochs": 2}, {"skip_probability": 0.8, "lr_decay": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_algorithm_1(hyper: dict[str, Any], engine: str):
    method = FedPD(Quadratic(), FedPD.Hyper(**{"lr": 0.05, "batch_size": 2, "eta": 0.3, **hyper}))
    here = setup(method, rounds=8, engine=engine)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    exchanges = [seeding.coin(here.seed, round) >= method.hyper.skip_probability for round in range(8)]
    assert sum(exchanges) > 0 and (sum(exchanges) < 8) == (method.hyper.skip_probability > 0)
    for round, (x0, x, anchor, lam) in enumerate(followed(method, here)):
        np.testing.assert_allclose(flat(run_states[round].server["params"]), x0, rtol=1e-5, atol=1e-5)
        for i in CLIENTS:
            state = tree.to_tensors(executor.get(run_states[round].states[i]))
            for name, value in (("params", x), ("anchor", anchor), ("multiplier", lam)):
                np.testing.assert_allclose(flat(state[name]), value[i], rtol=1e-4, atol=1e-4, err_msg=name)
        # Everyone or nobody: 40 bytes each way, or nothing at all.
        bits = 320 if exchanges[round] else 0
        assert {(row.uplink_bits, row.downlink_bits) for row in records[round].clients} == {(bits, bits)}


def exact(**hyper: Any) -> Any:
    """So many full-batch steps that x_i is the minimiser of L_i to float32."""
    return FedPD(Quadratic(), FedPD.Hyper(**{"lr": 0.2, "batch_size": 0, "steps": 60, "eta": 1.0, **hyper}))


@pytest.mark.parametrize("skip_probability", [0.0, 0.5])
def test_with_an_exact_oracle_the_multiplier_is_minus_the_gradient(skip_probability: float):
    here = setup(exact(skip_probability=skip_probability), rounds=4)
    executor = InlineExecutor(here)
    for run_state in play(here, executor)[1]:
        for i in CLIENTS:
            state = tree.to_tensors(executor.get(run_state.states[i]))
            gradient = points(here, i).gradient(flat(state["params"]))
            assert np.abs(gradient).max() > 0.1
            np.testing.assert_allclose(flat(state["multiplier"]), -gradient, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.5, 3.0])
def test_reaches_the_minimiser_of_the_mean_loss(eta: float):
    # In rounds without an exchange clients that differ walk towards their own minimisers, so p = 0.
    here = setup(exact(eta=eta, steps=60), rounds=50)
    mine = [points(here, i) for i in CLIENTS]
    hessian = np.mean([each.hessian() for each in mine], axis=0)
    linear = np.mean([(each.a * each.c).mean(axis=0) for each in mine], axis=0)
    minimiser = linear / hessian
    # The clients disagree: each one's own minimiser is far from it.
    own = [(each.a * each.c).mean(axis=0) / each.hessian() for each in mine]
    assert min(np.abs(x - minimiser).max() for x in own) > 0.3
    end = flat(play(here)[1][-1].server["params"])
    np.testing.assert_allclose(end, minimiser, atol=1e-4)


def test_a_client_that_was_away_goes_on_from_its_own_anchor():
    here = setup(
        FedPD(Quadratic(), FedPD.Hyper(lr=0.05, batch_size=2)), rounds=6, clients={"dropout_after_training": 0.4}
    )
    executor = InlineExecutor(here)
    _, run_states = play(here, executor)
    met = 0
    for round, run_state in enumerate(run_states):
        delivered = with_status(here.population.sample_round(round), "delivered")
        for i, ref in run_state.states.items():
            state = tree.to_tensors(executor.get(ref))
            fresh = np.array_equal(flat(state["anchor"]), flat(run_state.server["params"]))
            assert fresh == (i in delivered) or not delivered
            met += not fresh
    assert met


@pytest.mark.parametrize(
    "clients",
    [{"per_round": 2}, {"dropout_before_download": 0.2, "upload_loss": 0.2}, {"per_round": 3, "upload_loss": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("skip_probability", [0.0, 0.4])
def test_the_mean_is_that_of_the_anchors_that_arrived(clients: dict[str, Any], skip_probability: float):
    # Also of clients whose last exchange lies behind others that they missed.
    method = FedPD(Quadratic(), FedPD.Hyper(lr=0.05, batch_size=2, eta=0.3, skip_probability=skip_probability))
    here = setup(method, rounds=8, clients=clients)
    records, run_states = play(here)
    x0, x, lam = start(here), np.tile(start(here), (4, 1)), np.zeros((4, 10))
    anchor, behind, caught_up = x.copy(), set(), 0
    for round, (record, run_state) in enumerate(zip(records, run_states, strict=True)):
        exchange = seeding.coin(here.seed, round) >= skip_probability
        # Where nothing is sent, nothing is lost.
        drawn = here.population.sample_round(round)
        delivered = with_status(drawn, "delivered") if exchange else with_status(drawn, "delivered", "upload_lost")
        for i in delivered:
            for batch in batches(here, round, i, epochs=1, batch_size=2):
                x[i] = x[i] - 0.05 * (batch.gradient(x[i]) + lam[i] + (x[i] - anchor[i]) / 0.3)
            lam[i] = lam[i] + (x[i] - anchor[i]) / 0.3
            anchor[i] = x[i] + 0.3 * lam[i]
        if exchange and delivered:
            x0 = anchor[list(delivered)].mean(axis=0)
            anchor[list(delivered)] = x0
        np.testing.assert_allclose(flat(run_state.server["params"]), x0, rtol=1e-5, atol=1e-5)
        # A client that is behind downloads x0 first: 40 bytes more.
        sent = {row.client: row.downlink_bits for row in record.clients if row.client in delivered}
        assert sent == {i: exchange * 320 * (1 + (i in behind)) for i in delivered}
        caught_up += exchange and bool(behind & set(delivered))
        if exchange and delivered:
            behind = (behind | set(CLIENTS)) - set(delivered)
    assert caught_up


def test_the_coin_is_shared_and_comes_from_the_seed():
    method = FedPD(Quadratic(), FedPD.Hyper(skip_probability=0.25))
    assert [(plan.up, plan.down) for plan in (method.plan(0, 0.2499), method.plan(0, 0.25))] == [
        (False, False),
        (True, True),
    ]
    here = setup(FedPD(Quadratic(), FedPD.Hyper(skip_probability=0.5, batch_size=2)), rounds=12)
    patterns = {seed: [r.row.uplink_bits > 0 for r in play(replace(here, seed=seed))[0]] for seed in (1, 2, 3)}
    for seed, pattern in patterns.items():
        assert pattern == [seeding.coin(seed, round) >= 0.5 for round in range(12)]
    assert len({tuple(pattern) for pattern in patterns.values()}) == 3
