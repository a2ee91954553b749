"""APFL against its equations in numpy, its share's gradient by finite differences, and its two ends."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.methods.personal.apfl import APFL
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, Server, assert_follows, followed, made, rate, train_batches
from tests.methods.own_models import personal
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}


def shares(here: Setup, run_state: RunState) -> np.ndarray:
    """All alpha_i [4]; of a client that was never there its first one."""
    states = {i: tree.to_tensors(InlineExecutor(here).get(ref)) for i, ref in run_state.states.items()}
    return np.array([float(states[i]["alpha"] if i in states else here.first_state(i)["alpha"]) for i in range(4)])


def adapted(here: Setup, path: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """All v_i [4, 10] and alpha_i [4] after every round; `path` is x after every round."""
    hyper = here.method.hyper.model_dump()
    v, alpha, seen = np.stack([start(here)] * 4), np.full(4, hyper["alpha"]), []
    for round, x in enumerate([start(here), *path[:-1]]):
        lr = rate(here, round)
        for i in with_status(here.population.sample_round(round), "delivered"):
            w, share = x, alpha[i]
            for step, batch in enumerate(train_batches(here, round, i)):
                gradient = batch.gradient(share * v[i] + (1 - share) * w)
                slope = gradient @ (v[i] - w)
                w = w - lr * batch.gradient(w)
                v[i] = v[i] - lr * share * gradient
                if step == 0:
                    eta = lr if hyper["alpha_lr"] is None else hyper["alpha_lr"]
                    share = min(1.0, max(0.0, share - eta * slope))
            alpha[i] = share
        seen.append((v.copy(), alpha.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{}, {"alpha": 0.3, "alpha_lr": 0.02, "epochs": 2, "lr_decay": 0.8}, {"alpha_lr": 50.0}], ids=str
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("apfl", {**HYPER, **hyper}, rounds=5, clients=clients)
    records, run_states = play(here)
    path = followed(here, Server())
    assert_follows(run_states, path)
    expected = adapted(here, path)
    for run_state, (v, alpha) in zip(run_states, expected, strict=True):
        np.testing.assert_allclose(personal(here, run_state), v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(shares(here, run_state), alpha, rtol=1e-4, atol=2e-5)
    ends = expected[-1][1]
    assert np.isin(ends, [0, 1]).any() or hyper.get("alpha_lr") != 50.0
    assert np.ptp(ends) > 1e-3 or hyper.get("alpha_lr") != 0.02
    for record in records:
        assert record.row.uplink_bits == (320 + 64) * record.row.delivered


def test_the_share_moves_down_the_slope_of_the_personal_loss():
    """One full-batch step a round: alpha moves by -eta times the slope of f_i(alpha v + (1 - alpha) x) in alpha."""
    here = made("apfl", {"lr": 0.3, "steps": 1, "batch_size": 0, "alpha_lr": 0.05}, rounds=4)
    run_states, h = play(here)[1], 1e-4
    for before, after in pairwise(run_states[1:]):
        x, v = flat(before.server["params"]), personal(here, before)
        for i, (old, new) in enumerate(zip(shares(here, before), shares(here, after), strict=True)):
            above, below = (points(here, i).loss(a * v[i] + (1 - a) * x) for a in (old + h, old - h))
            assert new - old == pytest.approx(-0.05 * (above - below) / (2 * h), rel=1e-3, abs=1e-6)
            assert new != old


def test_at_its_ends_it_is_fedavg_and_local():
    shared = {**HYPER, "momentum": 0.5}
    fedavg, local = (made(name, shared, rounds=3) for name in ("fedavg", "local"))
    ends = {alpha: made("apfl", {**shared, "alpha": alpha, "alpha_lr": 0.0}, rounds=3) for alpha in (0.0, 1.0)}
    plain, alone = play(fedavg)[1], play(local)[1]
    none, whole = (play(ends[alpha])[1] for alpha in (0.0, 1.0))
    for one, two in zip(plain, none, strict=True):
        assert flat(one.server["params"]).tolist() == flat(two.server["params"]).tolist()
    np.testing.assert_array_equal(personal(ends[0.0], none[-1]), [start(fedavg)] * 4)
    np.testing.assert_array_equal(personal(ends[1.0], whole[-1]), personal(local, alone[-1]))


def test_the_mixture_is_evaluated():
    here = made("apfl", {**HYPER, "epochs": 2}, rounds=2, clients={"per_round": 2}, evaluation=Evaluation())
    records, run_states = play(here)
    x, (v, alpha) = flat(run_states[-1].server["params"]), (f(here, run_states[-1]) for f in (personal, shares))
    found = {(m.client, m.name): m.value for m in records[-1].metrics}
    for i in range(4):
        mixture = alpha[i] * v[i] + (1 - alpha[i]) * x
        assert found[i, "own/loss"] == pytest.approx(points(here, i, "test").loss(mixture), rel=1e-4)
    before = flat(run_states[0].server["params"])
    for i in here.population.sample_round(1).selected:
        w = before
        for batch in train_batches(here, 1, i):
            w = w - 0.1 * batch.gradient(w)
        mixture = alpha[i] * v[i] + (1 - alpha[i]) * w
        assert found[i, "own_after_training/loss"] == pytest.approx(points(here, i, "test").loss(mixture), rel=1e-4)
    # The global model is x.
    assert torch.equal(here.server_half.model(run_states[-1].server)["bias"], run_states[-1].server["params"]["bias"])
    assert here.method.gradients_per_example(here.plan(0).stages[0], here.context(0, here.plan(0), 0, "client")) == 2


def test_a_share_is_between_0_and_1():
    with refused(names=["alpha=1.5", "1"]):
        APFL.Hyper(alpha=1.5)
