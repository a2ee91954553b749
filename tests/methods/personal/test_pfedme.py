"""pFedMe and pFedMac on quadratics: both loops in numpy, fixed points in closed form, and who trains and who sends."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.methods.personal.pfedmac import PFedMac
from rayfl.methods.personal.pfedme import PFedMe
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, Factors, assert_follows, made, optima, untouched, wells
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "lam": 4.0, "personal_lr": 0.15, "inner_steps": 3, "steps": 4, "batch_size": 2, "beta": 1.5}
METHODS = {"pfedme": {}, "pfedmac": {"lam": 0.6, "lr": 0.5, "weight_decay": 0.2}}
EVALUATED = Evaluation(pooled=False)


def trained(here: Setup, round: int, client: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w_{i,R} and the last theta of a round that begins at x; each outer step has one batch for all inner ones."""
    hyper = here.method.hyper.model_dump()
    lam, lr, inner_lr = hyper["lam"], hyper["lr"] * hyper["lr_decay"] ** round, hyper["personal_lr"]
    w, theta = x, x
    for batch in batches(here, round, client, steps=hyper["steps"], batch_size=hyper["batch_size"] or 99):
        for _ in range(hyper["inner_steps"]):
            bond = -lam * w if isinstance(here.method, PFedMac) else lam * (theta - w)
            theta = theta - inner_lr * (batch.gradient(theta) + bond + hyper["weight_decay"] * theta)
        w = w - lr * lam * (w - theta)
    return w, theta


def simulated(here: Setup, factors: Factors = untouched) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """x and everyone's theta [4, 10] after every round; `factors` multiply the averaged delta."""
    x, thetas, path, seen = start(here), np.stack([start(here)] * 4), [], []
    beta = here.method.hyper.model_dump()["beta"]
    for round in range(here.rounds):
        participation = here.population.sample_round(round)
        statuses = ("dropped_before_download", "dropped_after_training")
        gone = {client for status in statuses for client in with_status(participation, status)}
        ends = {i: trained(here, round, i, x) for i in range(4) if i not in gone}
        for i, (_, theta) in ends.items():
            thetas[i] = theta
        if delivered := with_status(participation, "delivered"):
            mean = np.mean([ends[i][0] for i in delivered], axis=0)
            x = x - beta * factors(round, x) * (x - mean)
        path.append(x)
        seen.append(thetas.copy())
    return path, seen


def global_path(here: Setup, factors: Factors = untouched) -> list[np.ndarray]:
    return simulated(here, factors)[0]


def held(here: Setup, run_state: RunState) -> np.ndarray:
    """The models that the clients are evaluated by [4, 10]; of one that has no state yet the common start."""
    executor = InlineExecutor(here)
    states = {client: tree.to_tensors(executor.get(ref)) for client, ref in run_state.states.items()}
    return np.stack([flat(states[i]["params"]) if i in states else start(here) for i in range(4)])


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, name: str, clients: dict[str, Any]):
    hyper = {**HYPER, "lr_decay": 0.9, **METHODS[name]}
    here = made(name, hyper, rounds=4, engine=engine, clients=clients)
    records, run_states = play(here)
    path, thetas = simulated(here)
    assert_follows(run_states, path)
    for run_state, expected in zip(run_states, thetas, strict=True):
        np.testing.assert_allclose(held(here, run_state), expected, rtol=1e-4, atol=1e-5)
    # All that are there download x, and only the sampled ones send 40 bytes.
    for round, record in enumerate(records):
        participation = here.population.sample_round(round)
        assert record.row.uplink_bits == 320 * len(with_status(participation, "delivered"))
        assert record.row.downlink_bits == 320 * (4 - len(with_status(participation, "dropped_before_download")))


@pytest.mark.parametrize("inner_steps", [1, 12])
def test_the_global_model_ends_where_the_clients_pull_equally(inner_steps: int):
    """Full batches, R = 1: K inner steps leave theta = p + r^K (x - p) with r = 1 - personal_lr (h + lam) and the
    minimiser p = (h c + lam x) / (h + lam). x rests where sum_i (x - theta_i) = sum_i (1 - r^K) (x - p_i) = 0, and
    x - p = h / (h + lam) (x - c): the mean of the centres weighted by (1 - r^K) h / (h + lam).

    With many steps p is met, and x is the mean of the personal models, as the paper says.
    """
    hyper = {"lr": 0.2, "lam": 3.0, "personal_lr": 0.2, "inner_steps": inner_steps, "steps": 1, "batch_size": 0}
    here = made("pfedme", hyper, rounds=90)
    h, c = wells(here)
    weights = (1 - (1 - 0.2 * (h + 3.0)) ** inner_steps) * h / (h + 3.0)
    run_state = play(here)[1][-1]
    x = flat(run_state.server["params"])
    np.testing.assert_allclose(x, optima(weights, c, np.ones(4)), atol=1e-4)
    np.testing.assert_allclose(held(here, run_state).mean(axis=0), x, atol=1e-4)
    if inner_steps > 1:
        np.testing.assert_allclose(held(here, run_state), (h * c + 3.0 * x) / (h + 3.0), atol=1e-4)


def test_pfedmac_with_a_weight_decay_of_lam_is_pfedme():
    # g - lam w + lam theta is g + lam (theta - w).
    one, other = (made(name, {**HYPER, "weight_decay": decay}) for name, decay in (("pfedme", 0.0), ("pfedmac", 4.0)))
    for a, b in zip(play(one)[1], play(other)[1], strict=True):
        np.testing.assert_allclose(flat(a.server["params"]), flat(b.server["params"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("personal", ["theta", "w"])
def test_the_personal_model_is_evaluated(personal: str):
    hyper = {**HYPER, "personal": personal}
    here = made("pfedme", hyper, rounds=2, clients={"per_round": 2}, evaluation=EVALUATED)
    records, run_states = play(here)
    x = flat(run_states[0].server["params"])
    for name in ("own/loss", "own_after_training/loss"):
        measured = {m.client: m.value for m in records[1].metrics if m.name == name and m.client is not None}
        clients = [client for client in measured if client >= 0]
        assert clients == [0, 1, 2, 3]
        for client in clients:
            w, theta = trained(here, 1, client, x)
            model = theta if personal == "theta" else w
            assert measured[client] == pytest.approx(points(here, client, "test").loss(model), rel=1e-4)


def test_the_defaults_are_the_papers_but_for_the_step_of_theta():
    hyper, plan = PFedMe().hyper.model_dump(), PFedMe().plan(0, 0.0)
    assert [hyper[key] for key in ("lam", "inner_steps", "lr", "personal_lr", "beta")] == [15.0, 5, 0.005, 0.03, 1.0]
    assert hyper["weighting"] == "uniform" and hyper["weight_decay"] == 0
    assert (plan.trainers, plan.stages[0].steps, plan.stages[0].batch_size) == ("all", 20, 20)
    mac = PFedMac().hyper.model_dump()
    assert [mac[key] for key in ("lam", "weight_decay", "inner_steps", "lr", "personal_lr")] == [0.1, 1e-3, 5, 0.5, 0.1]


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        (PFedMe, {"lr": 0.1, "lam": 15.0}, ["lr=0.1", "lam=15.0", "1.5", "below 1"]),
        (PFedMe, {"lr": 0.04, "lr_schedule": "cosine-literal"}, ["lr=0.04", "lam=15.0", "1.2", "below 1"]),
        (PFedMe, {"personal_lr": 0.2}, ["personal_lr=0.2", "15", "lower"]),
        (PFedMac, {"lr": 0.5, "lam": 2.0}, ["lr=0.5", "lam=2.0", "below 1"]),
        (PFedMac, {"personal_lr": 1.0, "weight_decay": 2.0}, ["personal_lr=1.0", "times 2", "lower"]),
        (PFedMe, {"momentum": 0.9}, ["momentum=0.9", "plain steps", "remove"]),
    ],
)
def test_settings_that_diverge_are_refused(kind: type[PFedMe], settings: dict[str, Any], names: list[str]):
    with refused(names=names):
        kind.Hyper(**settings)
