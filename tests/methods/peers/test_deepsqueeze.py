"""DeepSqueeze against its equations, with peers that are away; its mean, its limit, its bits, its refusals."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.random import RandK
from rayfl.compress.sparse import TopK
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import Exponential, FullyConnected, Grid, RandomNeighbours, RandomRegular, Ring, Topology
from tests.contracts.seams.closed_form import start
from tests.methods.convex import DENSE_BITS, SPARSE_BITS
from tests.methods.gossip import LINE, UPLINKS, Uplink, generators, of_states, trained, world
from tests.methods.plain_peers import ABSENCES, DIM, NUM_PEERS, absent, made, matrix, models
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2, "lr_decay": 0.9}
METROPOLIS = Ring(weights="metropolis")
CHANGING = RandomRegular(degree=2, weights="metropolis")


def followed(here: Setup, uplink: Uplink, gamma: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """All models and all errors [4, 10] after every round."""
    assert here.topology is not None
    x, errors, seen = np.tile(start(here), (NUM_PEERS, 1)), np.zeros((NUM_PEERS, DIM)), []
    for round in range(here.rounds):
        away, lost = absent(here.population.sample_round(round, everyone=True))
        present = [i for i in range(NUM_PEERS) if i not in away]
        y = trained(here, round, x, set(range(NUM_PEERS)) - lost)
        sent = np.zeros_like(x)
        for i, generator in enumerate(generators(here, round)):
            if i in present:
                sent[i] = uplink.encoded(y[i] + errors[i], generator)
        errors = np.array([y[i] + errors[i] - sent[i] if i in present else errors[i] for i in range(NUM_PEERS)])
        x = y + gamma * (matrix(here.topology, here.seed, round, present) - np.eye(NUM_PEERS)) @ sent
        seen.append((x, errors))
    return seen


@pytest.mark.parametrize(
    ("topology", "own", "clients"),
    [
        (Ring(), {}, {}),
        (METROPOLIS, {"gamma": 0.3, "steps": 3}, ABSENCES[1]),
        (LINE, {}, ABSENCES[2]),
        (CHANGING, {"epochs": 2}, ABSENCES[2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", UPLINKS)
def test_follows_its_equations(name: str, topology: Topology, own: dict[str, Any], clients: dict[str, Any]):
    uplink = UPLINKS[name]
    here = made("deepsqueeze", {**HYPER, **own}, rounds=6, topology=topology, uplink=uplink.uplink, clients=clients)
    expected, seen = followed(here, uplink, own.get("gamma", 0.1 * uplink.delta)), 0
    for run_state, (x, errors) in zip(play(here)[1], expected, strict=True):
        np.testing.assert_allclose(models(here, run_state), x, atol=1e-5)
        if len(run_state.states) == NUM_PEERS:
            np.testing.assert_allclose(of_states(here, run_state, "error"), errors, atol=1e-5)
            seen += 1
    assert seen


@pytest.mark.parametrize(
    ("topology", "clients"),
    [
        (Ring(), {}),
        (METROPOLIS, ABSENCES[1]),
        (LINE, ABSENCES[2]),
        (CHANGING, ABSENCES[2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["topk", "randk"])
def test_the_mean_stays(name: str, topology: Topology, clients: dict[str, Any]):
    hyper = {"lr": 1e-12, "gamma": 0.2}
    here = made("deepsqueeze", hyper, rounds=8, topology=topology, uplink=UPLINKS[name].uplink, clients=clients)
    x = np.random.default_rng(0).standard_normal((NUM_PEERS, DIM))
    _, run_states = play(here, run_state=world(here, x, error=np.zeros_like(x)))
    for run_state in run_states:
        np.testing.assert_allclose(models(here, run_state).mean(axis=0), x.mean(axis=0), atol=5e-6)
    assert np.abs(models(here, run_states[-1]) - x).max() > 0.05


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("topology", [METROPOLIS, LINE], ids=lambda graph: graph.name)
def test_with_a_dense_uplink_and_gamma_1_it_is_dpsgd(topology: Topology, clients: dict[str, Any]):
    options = {"rounds": 5, "topology": topology, "clients": clients}
    ours, plain = made("deepsqueeze", {**HYPER, "gamma": 1.0}, **options), made("dpsgd", HYPER, **options)
    for one, other in zip(play(ours)[1], play(plain)[1], strict=True):
        np.testing.assert_allclose(models(ours, one), models(plain, other), atol=2e-6)


@pytest.mark.parametrize(("name", "bits"), [("dense", DENSE_BITS), ("topk", SPARSE_BITS), ("randk", SPARSE_BITS)])
def test_a_link_costs_one_compressed_model_each_way(name: str, bits: int):
    here = made("deepsqueeze", HYPER, rounds=3, topology=LINE, uplink=UPLINKS[name].uplink)
    for record in play(here)[0]:
        assert [(row.uplink_bits, row.downlink_bits) for row in record.clients] == [
            (links * bits, links * bits) for links in (1, 2, 2, 1)
        ]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"clients": {"dropout_before_download": 0.1}},
            ["topology", "weights='uniform'", "whichever peers are absent", "metropolis"],
        ),
        ({"topology": RandomNeighbours(degree=2)}, ["topology", "random", "symmetric"]),
        ({"topology": Exponential()}, ["topology", "exponential", "symmetric"]),
        ({"topology": Grid(rows=1)}, ["topology", "grid", "weights='uniform'", "symmetric", "metropolis"]),
        ({"uplink": ErrorFeedback(inner=TopK())}, ["uplink", "feedback", "inside"]),
        ({"uplink": RandK(), "clients": {"retention_ratio": 0.5}}, ["clients.retention_ratio", "the same for all"]),
    ],
    ids=str,
)
def test_what_would_move_the_mean_is_refused(options: dict[str, Any], names: list[str]):
    with refused(names=[*names, "DeepSqueeze"]):
        made("deepsqueeze", {}, **options)


def test_graphs_may_change():
    here = made("deepsqueeze", HYPER, rounds=2, topology=RandomRegular(degree=2))
    assert np.isfinite(models(here, play(here)[1][-1])).all()
    made("deepsqueeze", HYPER, topology=FullyConnected(weights="metropolis"), clients=ABSENCES[2])
