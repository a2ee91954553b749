"""DSGDProx against an independent simulation, and its proximal term by hand."""

from typing import Any

import numpy as np
import pytest

from rayfl.testing.executors import play
from rayfl.topology.graphs import Topology
from tests.contracts.seams.closed_form import Points, points, start
from tests.methods.plain_peers import ABSENCES, GRAPHS, followed, made, models
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2, "epochs": 2}


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: f"{graph.name}-{graph.weights}")
def test_follows_its_equations(topology: Topology, clients: dict[str, Any]):
    def pulled(x: np.ndarray, begun: np.ndarray, batch: Points) -> np.ndarray:
        return batch.gradient(x) + 0.7 * (x - begun)

    here = made("dsgdprox", {**HYPER, "mu": 0.7}, rounds=5, topology=topology, clients=clients)
    for run_state, x in zip(play(here)[1], followed(here, pulled), strict=True):
        np.testing.assert_allclose(models(here, run_state), x, rtol=1e-5, atol=1e-5)


def test_two_steps_by_hand():
    # v1 = x - lr g(x); v2 = v1 - lr (g(v1) + mu (v1 - x)), with the whole split in a batch; then the ring's mean.
    here = made("dsgdprox", {"lr": 0.2, "batch_size": 0, "steps": 2, "mu": 3.0}, rounds=1)
    x, ends = start(here), []
    for client in range(4):
        mine = points(here, client)
        v = x - 0.2 * mine.gradient(x)
        ends.append(v - 0.2 * (mine.gradient(v) + 3.0 * (v - x)))
    expected = [(ends[i - 1] + ends[i] + ends[(i + 1) % 4]) / 3 for i in range(4)]
    np.testing.assert_allclose(models(here, play(here)[1][0]), expected, rtol=1e-5, atol=1e-6)


def test_without_the_term_it_is_dpsgd():
    prox, plain = made("dsgdprox", {**HYPER, "mu": 0.0}), made("dpsgd", HYPER)
    assert np.array_equal(models(prox, play(prox)[1][-1]), models(plain, play(plain)[1][-1]))


def test_a_term_that_cannot_act_is_refused():
    with refused(names=["steps=1", "at least 2", "epochs"]):
        made("dsgdprox", {"steps": 1})
    with refused(names=["order='lian'", "order='average_first'"]):
        made("dsgdprox", {"order": "lian", "steps": 2})
