"""FedALA against its equations in numpy, a weight by hand, and FedAvg where it is FedAvg."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.batches import Batch
from rayfl.methods.base import Stage
from rayfl.methods.fedala import FedALA
from rayfl.rounds.setup import Evaluation, Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import BIAS, Points, batches, flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.methods.personal import personal
from tests.population.fates import with_fate
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2, "weights_lr": 0.7}
ALL = slice(0, 10)


def passes(here: Setup, round: int, client: int) -> list[Points]:
    """The batches by which a client fits its weights: the first share of those of all passes."""
    hyper = here.method.hyper.model_dump()
    size, epochs = hyper["batch_size"] or TRAIN[client], hyper["first_passes"] if round == 1 else 1
    found = batches(here, round, client, "weights", epochs=epochs, batch_size=size)
    return found[: max(1, int(hyper["share"] * len(found) + 0.5))]


def mixing(here: Setup, last: slice) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """x, all u_i and W_i [4, 10] after every round, with W_i = 1 in the first tensors; and the batches left out."""
    eta = here.method.hyper.model_dump()["weights_lr"]
    x, u, weights, left_out, seen = start(here), np.stack([start(here)] * 4), np.ones((4, 10)), 0, []
    for round in range(here.rounds):
        delivered = with_fate(here.population.sample_round(round), "delivered")
        for i in delivered:
            t, losses = u[i] + (x - u[i]) * weights[i], []
            for batch in passes(here, round, i) if round else []:
                if round == 1 and len(losses) >= 10 and np.std(losses[-10:]) < 0.1:
                    left_out += 1
                    continue
                losses.append(batch.loss(t))
                step = eta * batch.gradient(t) * (x - u[i])
                weights[i][last] = np.clip(weights[i] - step, 0, 1)[last]
                t = u[i] + (x - u[i]) * weights[i]
            for batch in train_batches(here, round, i):
                t = t - rate(here, round) * batch.gradient(t)
            u[i] = t
        if delivered:
            p = np.array([share(here, i) for i in delivered])
            x = p @ u[list(delivered)] / p.sum()
        seen.append((x, u.copy(), weights.copy(), left_out))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    ("hyper", "last"),
    [
        ({}, ALL),
        ({"batch_size": 0}, ALL),
        ({"num_mixed": 1, "share": 0.5, "first_passes": 9, "weighting": "uniform", "epochs": 2}, BIAS),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], last: slice, clients: dict[str, Any]):
    here = made("fedala", {**HYPER, **hyper}, rounds=4, clients=clients, engine=engine)
    records, run_states = play(here)
    path = mixing(here, last)
    for run_state, (x, u, weights, _) in zip(run_states, path, strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(personal(here, run_state), u, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(personal(here, run_state, "weights"), weights[:, last], rtol=1e-4, atol=3e-5)
    assert 0 <= path[-1][2].min() < 0.9 and path[-1][2].max() == 1
    if not clients:
        assert bool(path[-1][3]) == (hyper == {"batch_size": 0})
    up = 320 + (0 if hyper.get("weighting") == "uniform" else 64)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


def test_a_weight_by_hand():
    # One sample with c = 0 and a = 1, so the gradient is t. x = 3, u = 1, W = 1: t = 3, and W = 1 - 0.1 * 3 * 2 = 0.4.
    # Then t = 1 + 2 * 0.4 = 1.8, and W = 0.4 - 0.1 * 1.8 * 2 = 0.04; t = 1.08, and W is cut at 0, so that t = u = 1.
    method = FedALA(Quadratic(), FedALA.Hyper(weights_lr=0.1, num_mixed=1))
    x, own = ({"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)} for value in (3.0, 1.0))
    sample = torch.stack([torch.zeros(10), torch.ones(10)])
    batch, stage = Batch(sample[None], torch.zeros(1, dtype=torch.int64)), Stage("weights", epochs=1)
    losses, weights = torch.full((10,), torch.nan), {"bias": torch.ones(2)}
    carry: Any = {**method.start(x), "own": own, "weights": weights, "losses": losses}
    for weight, t in ((0.4, 1.8), (0.04, 1.08), (0.0, 1.0)):
        carry = method.step(carry, batch, stage=stage)
        np.testing.assert_allclose(carry["weights"]["bias"], [weight] * 2, atol=1e-6)
        np.testing.assert_allclose(flat(carry["params"]), [3.0] * 8 + [t] * 2, rtol=1e-6)
    # Where x is the own model nothing moves.
    carry = {**carry, "received": own, "weights": weights}
    assert method.step(carry, batch, stage=stage)["weights"]["bias"].tolist() == [1, 1]


def test_weights_that_stay_at_1_are_fedavg():
    settings = {**HYPER, "momentum": 0.5}
    mixed = play(made("fedala", {**settings, "weights_lr": 0.0}, clients=ABSENCES[1]))[1]
    del settings["weights_lr"]
    for one, two in zip(mixed, play(made("fedavg", settings, clients=ABSENCES[1]))[1], strict=True):
        np.testing.assert_allclose(flat(one.server["params"]), flat(two.server["params"]), rtol=1e-6)


def test_the_plan_has_one_pass_but_in_the_first_two_rounds():
    method = FedALA(steps=3, share=0.7)
    stages = [
        [(stage.name, stage.epochs, stage.share) for stage in method.plan(round, 0.0).stages] for round in (0, 1, 2)
    ]
    assert stages[0] == [("train", None, 1.0)]
    assert stages[1] == [("weights", 20, 0.7), ("train", None, 1.0)]
    assert stages[2] == [("weights", 1, 0.7), ("train", None, 1.0)]


def test_the_start_and_the_trained_model_are_evaluated():
    here = made("fedala", HYPER, rounds=3, clients={"per_round": 2}, evaluation=Evaluation())
    records, run_states = play(here)
    x, u = flat(run_states[-1].server["params"]), personal(here, run_states[-1])
    weights = personal(here, run_states[-1], "weights")
    found = {(m.client, m.name): m.value for m in records[-1].metrics}
    for i in range(4):
        t = u[i] + (x - u[i]) * weights[i]
        assert found[i, "own/loss"] == pytest.approx(points(here, i, "test").loss(t), rel=1e-4)
    for i in here.population.sample_round(2).selected:
        assert found[i, "own_after_training/loss"] == pytest.approx(points(here, i, "test").loss(u[i]), rel=1e-4)
        (row,) = [row for row in records[-1].clients if row.client == i]
        assert row.num_samples == TRAIN[i] + sum(len(batch) for batch in passes(here, 2, i))


def test_settings_out_of_bounds_are_refused():
    with refused(names=["num_mixed=0", "1"]):
        FedALA.Hyper(num_mixed=0)
    with refused(names=["share=1.2", "1"]):
        FedALA.Hyper(share=1.2)
