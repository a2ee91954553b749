"""SGP against its recursion; push-sum's mean on directed graphs, what it keeps, its bill."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.peers.sgp import SGP
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import (
    Exponential,
    FixedGraph,
    OnePeerExponential,
    RandomNeighbours,
    Ring,
    Topology,
)
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import batches, start
from tests.contracts.seams.quadratic import setup
from tests.methods.gossip import of_states
from tests.methods.plain_peers import ABSENCES, DIM, NUM_PEERS, absent, made, models
from tests.refusals import refused

DIRECTED = RandomNeighbours(degree=2, weights="column")


def shares(here: Setup, round: int, present: list[int]) -> np.ndarray:
    """P [4, 4], entry by entry: a sender's part of itself is one of 1 + its number of listeners."""
    assert here.topology is not None
    graph, weights = here.topology.receives(NUM_PEERS, here.seed, round), np.eye(NUM_PEERS)
    for sender in present:
        listeners = [peer for peer in present if graph[peer, sender]]
        weights[[sender, *listeners], sender] = 1 / (1 + len(listeners))
    return weights


def followed(here: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """All z [4, 10] and w [4] after every round."""
    hyper: Any = here.method.hyper
    x, w, seen = np.tile(start(here), (NUM_PEERS, 1)), np.ones(NUM_PEERS), []
    for round in range(here.rounds):
        away, lost = absent(here.population.sample_round(round, everyone=True))
        z = x / w[:, None]
        for i in set(range(NUM_PEERS)) - lost:
            mine = batches(here, round, i, epochs=hyper.epochs, steps=hyper.steps, batch_size=hyper.batch_size)
            trained = z[i].copy()
            for batch in mine:
                trained -= hyper.rate(round) * batch.gradient(trained)
            x[i] -= z[i] - trained
        weights = shares(here, round, [i for i in range(NUM_PEERS) if i not in away])
        x, w = weights @ x, weights @ w
        seen.append((x / w[:, None], w))
    return seen


def masses(here: Setup, run_state: RunState) -> np.ndarray:
    return np.array([float(InlineExecutor(here).get(run_state.states[i])["mass"]) for i in range(NUM_PEERS)])


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    ("topology", "hyper"),
    [(DIRECTED, {"steps": 1}), (Exponential(weights="column"), {"epochs": 2, "lr_decay": 0.9, "momentum": 0.5})],
    ids=["random", "exponential"],
)
def test_follows_its_equations(topology: Topology, hyper: dict[str, Any], clients: dict[str, Any]):
    if "momentum" in hyper:
        hyper = {**hyper, "momentum": 0.0}
    here = made("sgp", {"lr": 0.1, "batch_size": 2, **hyper}, rounds=6, topology=topology, clients=clients)
    for run_state, (z, w) in zip(play(here)[1], followed(here), strict=True):
        np.testing.assert_allclose(models(here, run_state), z, rtol=1e-6, atol=1e-6)
        if len(run_state.states) == NUM_PEERS:
            np.testing.assert_allclose(masses(here, run_state), w, rtol=1e-12)
            assert masses(here, run_state).sum() == pytest.approx(NUM_PEERS, abs=1e-12)


def with_models(here: Setup, x: np.ndarray) -> RunState:
    """The world before round 0 with these models [n, 10], and masses of 1."""
    executor, states = InlineExecutor(here), {}
    for i, row in enumerate(x - start(here)):
        first = here.first_state(i)
        u = {"weight": row[:8].reshape(2, 4).astype(np.float32), "bias": row[8:].astype(np.float32)}
        z = {name: u[name] + tensor.numpy() for name, tensor in here.initial.items()}
        states[i] = executor.put({"params": z, "shares": u, "mass": first["mass"].numpy()})
    return RunState(states=states)


def test_a_round_by_hand(tmp_path: Any):
    # 0 sends to 1 and 2, 1 to 2, 2 to 0, and 3 to nobody; x = (3, 6, 0, 7).
    (tmp_path / "graph.csv").write_text("1 0\n2 0\n2 1\n0 2\n")
    graph = FixedGraph(path=str(tmp_path / "graph.csv"), directed=True, weights="column").read(4)
    here = made("sgp", {"lr": 1e-9}, rounds=1, topology=graph)
    x = np.array([3.0, 6.0, 0.0, 7.0])[:, None] * np.ones(DIM)
    (last,) = play(here, run_state=with_models(here, x))[1]
    np.testing.assert_allclose(masses(here, last), [5 / 6, 5 / 6, 4 / 3, 1], rtol=1e-12)
    expected = np.array([1.2, 4.8, 3.0, 7.0])[:, None] * np.ones(DIM)
    np.testing.assert_allclose(models(here, last), expected, atol=2e-6)


@pytest.mark.parametrize("topology", [DIRECTED, OnePeerExponential(weights="column")], ids=lambda graph: graph.name)
@pytest.mark.parametrize("clients", ABSENCES[:2], ids=str)
def test_without_training_all_reach_the_exact_mean(topology: Topology, clients: dict[str, Any]):
    here = made("sgp", {"lr": 1e-9}, rounds=60, topology=topology, clients=clients)
    x = np.random.default_rng(1).standard_normal((NUM_PEERS, DIM)) + 3 * np.arange(NUM_PEERS)[:, None]
    last = play(here, run_state=with_models(here, x))[1][-1]
    np.testing.assert_allclose(models(here, last), np.tile(x.mean(axis=0), (NUM_PEERS, 1)), atol=1e-5)
    if topology is DIRECTED:
        # Uniform weights on the same graphs agree on another point.
        rows = made("dpsgd", {"lr": 1e-9}, rounds=60, topology=RandomNeighbours(degree=2), clients=clients)
        agreed = models(rows, play(rows, run_state=with_plain(rows, x))[1][-1])
        assert np.ptp(agreed, axis=0).max() < 1e-3 and np.abs(agreed - x.mean(axis=0)).max() > 0.05


def with_plain(here: Setup, x: np.ndarray) -> RunState:
    rows = [{"weight": row[:8].reshape(2, 4).astype(np.float32), "bias": row[8:].astype(np.float32)} for row in x]
    return RunState(states={i: InlineExecutor(here).put({"params": row}) for i, row in enumerate(rows)})


def test_on_doubly_stochastic_weights_it_is_dpsgd():
    hyper = {"lr": 0.1, "batch_size": 2}
    here, plain = (made(name, hyper, rounds=4, topology=Ring()) for name in ("sgp", "dpsgd"))
    for run_state, other in zip(play(here)[1], play(plain)[1], strict=True):
        np.testing.assert_allclose(models(here, run_state), models(plain, other), atol=1e-6)
        np.testing.assert_allclose(masses(here, run_state), 1.0, rtol=1e-12)


def test_the_sum_of_x_moves_by_training_alone():
    here = setup(SGP(made("sgp", {}).method.task, lr=0.1, batch_size=2), rounds=3, topology=DIRECTED)
    records, run_states = play(here)
    for run_state in run_states:
        w = masses(here, run_state)[:, None]
        x = w * models(here, run_state)
        u = of_states(here, run_state, "shares")
        np.testing.assert_allclose(x - w * start(here), u, atol=2e-6)
    # A link costs the model and the mass of its sender.
    graph = here.topology.receives(NUM_PEERS, here.seed, 2)  # type: ignore[union-attr]
    sent = 32 * DIM + 64
    assert [(row.uplink_bits, row.downlink_bits) for row in records[2].clients] == [
        (int(graph[:, i].sum()) * sent, int(graph[i].sum()) * sent) for i in range(NUM_PEERS)
    ]


def test_weights_that_lose_mass_and_compressors_are_refused():
    with refused(names=["random", "SGP", "column", "weights='column'"]):
        made("sgp", {}, topology=RandomNeighbours(degree=2))
    with refused(names=["SGP", "absent", "weights='column'"]):
        made("sgp", {}, topology=Ring(), clients=ABSENCES[1])
    with refused(names=["uplink", "SGP"]):
        experiment("sgp", uplink="topk")
