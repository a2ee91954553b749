"""LAG, by the workers' rule and by the server's, against its steps in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.methods.compressed.lag import LAG
from rayfl.methods.compressed.lag_ps import LAGPS
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import Points, flat, points, start
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.population.statuses import with_status
from tests.refusals import refused

JUDGED = Evaluation(pooled=False)
MODEL = 320
"""Bits of 10 fp32 entries."""


@dataclass
class Round:
    """What a round comes to: x and the sent gradients [4, 10] after it, who downloads, and who uploads."""

    x: np.ndarray
    sent: np.ndarray
    asked: set[int]
    uploads: set[int]


def tolerated(hyper: dict[str, Any], round: int, steps: list[float]) -> float:
    """(1 / lr^2) sum_d xi s_d over the last D squared steps; `steps` has the newest first."""
    return hyper["threshold"] * sum(steps[: hyper["num_steps"]]) / (hyper["lr"] * hyper["lr_decay"] ** round) ** 2


def followed(here: Setup, clients: list[Points] | None = None) -> list[Round]:
    """LAG-WK and LAG-PS, told apart by the smoothness constant that only the second has."""
    hyper = here.method.hyper.model_dump()
    clients = clients or [points(here, k) for k in range(4)]
    x, sent, steps, rounds = start(here), np.zeros((4, 10)), [], []
    last_seen = [(0, x)] * 4
    known: list[list[float]] = [[] for _ in clients]
    uploaded: list[np.ndarray | None] = [None] * 4
    for round in range(here.rounds):
        drawn = here.population.sample_round(round)
        asked, uploads = set(), set()
        for k in (*with_status(drawn, "delivered"), *with_status(drawn, "dropped_after_training")):
            away = k not in with_status(drawn, "delivered")
            change = clients[k].gradient(x) + hyper["l2"] * x - sent[k]
            if "smoothness" in hyper:
                point = uploaded[k]
                way = np.inf if point is None else hyper["smoothness"] ** 2 * ((x - point) ** 2).sum()
                if way > tolerated(hyper, round, steps):
                    asked.add(k)
                    if not away:
                        uploads.add(k)
                        uploaded[k] = x
            else:
                asked.add(k)
                if away:
                    continue
                # A client that missed m - 1 rounds counts its way as m equal steps.
                missed = round - last_seen[k][0]
                square = ((x - last_seen[k][1]) ** 2).sum() / max(missed, 1) ** 2
                known[k] = [square] * missed + known[k]
                last_seen[k] = (round, x)
                if (change**2).sum() > tolerated(hyper, round, known[k]):
                    uploads.add(k)
            if k in uploads:
                sent[k] += change
        new = x - hyper["lr"] * hyper["lr_decay"] ** round * sent.mean(axis=0)
        steps.insert(0, ((new - x) ** 2).sum())
        x = new
        rounds.append(Round(x, sent.copy(), asked, uploads))
    return rounds


def check(here: Setup) -> list[Round]:
    """Play, and compare who downloads, who uploads, every state and every byte; returns what was to be."""
    executor, expected = InlineExecutor(here), followed(here)
    records, run_states = play(here, executor)
    for record, run_state, wanted in zip(records, run_states, expected, strict=True):
        bits = {row.client: (row.uplink_bits, row.downlink_bits) for row in record.clients}
        assert bits == {k: (MODEL * (k in wanted.uploads), MODEL * (k in wanted.asked)) for k in bits}
        assert {row.client for row in record.clients if row.status == "delivered"} == wanted.uploads
        assert {row.client for row in record.clients if row.num_steps} == wanted.asked
        np.testing.assert_allclose(flat(run_state.server["params"]), wanted.x, rtol=1e-5, atol=1e-5)
        remembered = np.zeros(10)
        for k, ref in run_state.states.items():
            own = flat(tree.to_tensors(executor.get(ref))["sent"])
            np.testing.assert_allclose(own, wanted.sent[k], rtol=1e-4, atol=1e-5)
            remembered += own
        # The server's lagged sum is that of the gradients that the clients sent last.
        np.testing.assert_allclose(flat(run_state.server["gradients"]), remembered, rtol=1e-5, atol=1e-5)
    return expected


HYPERS = [
    {"lr": 0.3},
    {"lr": 0.3, "threshold": 0.5, "num_steps": 2},
    {"lr": 0.4, "lr_decay": 0.95, "threshold": 0.3, "l2": 0.2},
]
CLIENTS = [{}, {"per_round": 2}, {"dropout_after_training": 0.3, "dropout_before_download": 0.1}]


@pytest.mark.parametrize("clients", CLIENTS, ids=str)
@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("kind", [LAG, LAGPS])
def test_follows_its_rule(kind: type[Method], hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    rounds = check(setup(kind(Quadratic(), kind.Hyper(**hyper)), rounds=15, clients=clients, engine=engine))
    num_uploads = [len(round.uploads) for round in rounds]
    # Some are silent and some speak again after the first time.
    assert sum(num_uploads) > 5 and min(num_uploads) < max(num_uploads)
    assert 0 in num_uploads or not clients


@pytest.mark.parametrize(("kind", "hyper"), [(LAG, {}), (LAGPS, {"smoothness": 1.2})], ids=["lag", "lag_ps"])
def test_reaches_the_loss_of_gradient_descent_with_fewer_bytes(kind: type[Method], hyper: dict[str, Any]):
    lazy = setup(kind(Quadratic(), kind.Hyper(**{"lr": 0.3, **hyper})), rounds=60)
    eager = setup(LAG(Quadratic(), LAG.Hyper(lr=0.3, threshold=0.0)), rounds=60)
    mine = [points(lazy, k) for k in range(4)]
    minimiser = np.mean([(each.a * each.c).mean(axis=0) for each in mine], axis=0)
    minimiser /= np.mean([each.hessian() for each in mine], axis=0)

    def gap(x: np.ndarray) -> float:
        return float(np.mean([each.loss(x) - each.loss(minimiser) for each in mine]))

    def bits_until(here: Setup, target: float) -> int:
        records, run_states = play(here)
        first = next(r for r, run_state in enumerate(run_states) if gap(flat(run_state.server["params"])) < target)
        return sum(record.row.uplink_bits for record in records[: first + 1])

    for share in (1e-3, 1e-5):
        few, many = (bits_until(here, share * gap(start(lazy))) for here in (lazy, eager))
        assert few < 0.6 * many


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_whom_nobody_asks_does_and_reports_nothing(engine: str):
    # Half of the clients a round: 1 s for a client's download, 0.02 s or so for its gradient.
    clients = {"take_first": 1, "per_round": 3, "downlink_mbps": 320e-6}
    hyper = {"lr": 0.3, "smoothness": 1.2}
    here = setup(LAGPS(Quadratic(), LAGPS.Hyper(**hyper)), rounds=12, engine=engine, clients=clients, evaluation=JUDGED)
    records, _ = play(here)
    idle = [row for record in records for row in record.clients if row.status == "not_asked"]
    assert idle and {(row.num_steps, row.num_samples, row.simulated_s) for row in idle} == {(0, 0, 0.0)}
    for record in records:
        unasked = {row.client for row in record.clients if row.status == "not_asked"}
        measured = {m.client for m in record.metrics if m.name.startswith(("train/", "own_after_training/"))}
        assert not measured & unasked
        # The first to finish is one that was asked: nobody else delivers, and the round lasts as long.
        rest = {row.status for row in record.clients if row.client not in unasked}
        assert rest <= {"delivered", "surplus"} and ("delivered" in rest) == bool(rest)
        assert record.row.simulated_s > 1 or not rest


def test_without_a_threshold_it_is_gradient_descent():
    here = setup(LAG(Quadratic(), LAG.Hyper(lr=0.5, threshold=0.0)), rounds=8)
    x = start(here)
    for run_state in play(here)[1]:
        x = x - 0.5 * np.mean([points(here, k).gradient(x) for k in range(4)], axis=0)
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-5)


def test_a_change_as_large_as_the_rule_allows_is_not_sent():
    # No step was taken yet, so nothing is tolerated: only a gradient of exactly 0 keeps silent.
    class Flat(Quadratic):
        def value_and_grad(self, params, batch):
            loss, gradient = super().value_and_grad(params, batch)
            return loss, tree.zeros_like(gradient)

    records, _ = play(setup(LAG(Flat()), rounds=2))
    assert {row.status for record in records for row in record.clients} == {"silent"}
    assert [record.row.uplink_bits for record in records] == [0, 0]


@pytest.mark.parametrize("name", ["lag", "lag_ps"])
def test_clients_have_no_weights(name: str):
    given: dict[str, Any] = {"weighting": "samples"}
    with refused(names=["weighting='samples'", "uniform"]):
        find(Method, name).Hyper(**given)
