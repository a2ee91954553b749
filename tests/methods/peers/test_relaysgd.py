"""RelaySGD against Algorithm 1: messages of each link, exact means after the tree's diameter, absent neighbours."""

from typing import Any

import numpy as np
import pytest

from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import FullyConnected, Grid, RandomRegular, Ring, Topology
from rayfl.topology.of_another import SpanningTree
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import batches, points, start
from tests.methods.plain_peers import ABSENCES, DIM, NUM_PEERS, absent, made, models, world_of
from tests.refusals import refused

LINE, STAR = Grid(rows=1), SpanningTree(base=FullyConnected())
Messages = dict[tuple[int, int], tuple[np.ndarray, int]]


def followed(here: Setup) -> list[np.ndarray]:
    """All models [4, 10] after every round, with a message and its count for each link (sender, receiver)."""
    hyper: Any = here.method.hyper
    assert here.topology is not None
    graph = here.topology.receives(NUM_PEERS, here.seed, 0)
    x, first, seen = np.tile(start(here), (NUM_PEERS, 1)), start(here), []
    held: Messages = {}
    for round in range(here.rounds):
        away, lost = absent(here.population.sample_round(round, everyone=True))
        y = x.copy()
        for i in set(range(NUM_PEERS)) - lost:
            for batch in batches(here, round, i, epochs=hyper.epochs, steps=hyper.steps, batch_size=hyper.batch_size):
                y[i] -= hyper.rate(round) * batch.gradient(y[i])
        present = [i for i in range(NUM_PEERS) if i not in away]
        sent: Messages = {}
        for i in present:
            for j in (j for j in present if graph[j, i]):
                others = [held[k, i] for k in range(NUM_PEERS) if k != j and (k, i) in held]
                sent[i, j] = y[i] + sum(m for m, _ in others), 1 + sum(c for _, c in others)
        stand_in = held if hyper.missing == "last" else {link: old for link, old in held.items() if link[1] in lost}
        held = {**stand_in, **sent}
        x = y.copy()
        for i in set(range(NUM_PEERS)) - lost:
            mine = [held[k, i] for k in range(NUM_PEERS) if (k, i) in held]
            total, count = y[i] + sum(m for m, _ in mine), 1 + sum(c for _, c in mine)
            filled = {"counts": 0 * first, "own": (NUM_PEERS - count) * y[i], "initial": (NUM_PEERS - count) * first}
            x[i] = (total + filled[hyper.fill]) / (count if hyper.fill == "counts" else NUM_PEERS)
        seen.append(x)
    return seen


@pytest.mark.parametrize("clients", ABSENCES[::2], ids=str)
@pytest.mark.parametrize(
    ("topology", "hyper"),
    [
        (LINE, {"steps": 1, "fill": "counts"}),
        (LINE, {"epochs": 1, "fill": "own", "missing": "drop", "lr_decay": 0.9}),
        (STAR, {"steps": 2, "fill": "initial"}),
    ],
    ids=str,
)
def test_follows_its_equations(topology: Topology, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("relaysgd", {"lr": 0.1, "batch_size": 2, **hyper}, rounds=7, topology=topology, clients=clients)
    for run_state, x in zip(play(here)[1], followed(here), strict=True):
        np.testing.assert_allclose(models(here, run_state), x, rtol=1e-6, atol=1e-6)


def with_inboxes(x: np.ndarray, here: Setup) -> Any:
    """The world before round 0 with these models, when nothing has come yet."""
    world = world_of(x, here)
    return type(world)(states={i: {**state, "sums": {}, "counts": {}} for i, state in world.states.items()})


def test_two_rounds_by_hand():
    here = made("relaysgd", {"lr": 1e-9}, rounds=3, topology=LINE)
    x = np.array([3.0, 6.0, 0.0, 7.0])
    world = with_inboxes(x[:, None] * np.ones(DIM), here)
    seen = [models(here, state)[:, 0] for state in play(here, run_state=world)[1]]
    # Round 0: the mean of each peer and its neighbours. 0: (3, 6), 1: (3, 6, 0), 2: (6, 0, 7), 3: (0, 7).
    first = np.array([4.5, 3.0, 13 / 3, 3.5])
    np.testing.assert_allclose(seen[0], first, atol=2e-6)
    # Round 1: y of this round from itself and neighbours, of the round before from two hops away.
    second = [(4.5 + 3 + 0) / 3, (4.5 + 3 + 13 / 3 + 7) / 4, (13 / 3 + 3 + 3.5 + 3) / 4, (3.5 + 13 / 3 + 6) / 3]
    np.testing.assert_allclose(seen[1], second, atol=2e-6)


@pytest.mark.parametrize(("topology", "diameter"), [(LINE, 3), (STAR, 2)], ids=["line", "star"])
def test_all_have_the_exact_mean_once_the_tree_is_crossed(topology: Topology, diameter: int):
    """Constant y: every peer is set back to its own value before each exchange."""
    here = made("relaysgd", {"lr": 1e-9}, rounds=1, topology=topology)
    own = np.array([3.0, 6.0, 0.0, 7.0])[:, None] * np.ones(DIM)
    world, hops = with_inboxes(own, here), distances(topology)
    for round in range(diameter + 1):
        (world,) = play(here, run_state=type(world)(states=world.states))[1]
        near = hops <= round + 1
        expected = [own[near[i]].mean() for i in range(NUM_PEERS)]
        np.testing.assert_allclose(models(here, world)[:, 0], expected, atol=3e-6)
        reset = world_of(own, here)
        states = {i: {**state, "params": reset.states[i]["params"]} for i, state in world.states.items()}
        world = type(world)(states=states)
    assert near.all()


def distances(topology: Topology) -> np.ndarray:
    """Hops between every two peers, [4, 4]."""
    graph, hops = topology.receives(NUM_PEERS, 0, 0), np.full((NUM_PEERS, NUM_PEERS), 9)
    power = np.eye(NUM_PEERS, dtype=int)
    for distance in range(NUM_PEERS):
        hops = np.where((power > 0) & (hops == 9), distance, hops)
        power = power @ graph
    return hops


HYPER = {"lr": 0.2, "batch_size": 0, "steps": 1}


@pytest.mark.parametrize("clients", ABSENCES[:2], ids=str)
def test_a_constant_step_ends_at_the_minimiser_of_unlike_peers(clients: dict[str, Any]):
    here = made("relaysgd", HYPER, rounds=150, topology=LINE, clients=clients)
    mine = [points(here, i) for i in range(NUM_PEERS)]
    best = np.array([(one.a * one.c).mean(axis=0) for one in mine]).sum(axis=0) / sum(one.hessian() for one in mine)
    x = models(here, play(here)[1][-1])
    plain = made("dpsgd", HYPER, rounds=150, topology=Grid(rows=1, weights="metropolis"))
    assert np.abs(models(plain, play(plain)[1][-1]) - best).max() > 0.2
    np.testing.assert_allclose(x, np.tile(best, (NUM_PEERS, 1)), atol=5e-3 if clients else 1e-4)


def test_each_link_is_billed():
    here = made("relaysgd", {}, rounds=2, topology=LINE)
    for record in play(here)[0]:
        sent = [32 * (DIM + 1) * links for links in (1, 2, 2, 1)]
        assert [(row.uplink_bits, row.downlink_bits) for row in record.clients] == [(bits, bits) for bits in sent]


def test_a_spanning_tree_is_breadth_first_from_peer_0():
    assert SpanningTree(base=Ring()).receives(5, 0, 0).nonzero()[1].tolist() == [1, 4, 0, 2, 1, 4, 0, 3]
    star = STAR.receives(4, 0, 0)
    assert star[0].tolist() == [False, True, True, True] and star.sum() == 6


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"topology": Ring()}, ["topology='ring'", "cycle", "4 links for 4 peers", "spanning-tree"]),
        ({"topology": RandomRegular(degree=2)}, ["random-regular", "changes", "spanning-tree"]),
        ({"topology": SpanningTree(base=RandomRegular(degree=2))}, ["topology.base='random-regular'", "changes"]),
    ],
)
def test_what_is_no_tree_or_loses_something_is_refused(options: dict[str, Any], names: list[str]):
    with refused(names=names):
        made("relaysgd", {}, **{"topology": LINE, **options})


def test_a_tree_from_a_file_and_wrappers(tmp_path: Any):
    (tmp_path / "tree.txt").write_text("0 1\n1 2\n1 3\n3 4\n3 5\n")
    tree = {"name": "file", "path": str(tmp_path / "tree.txt")}
    prepare(experiment("relaysgd", topology=tree))
    prepare(experiment("relaysgd", topology={"name": "spanning-tree", "base": tree}))
    with refused(names=["clip", "RelaySGD"]):
        prepare(experiment("relaysgd", topology=tree, wrap=[{"name": "clip", "norm": 1.0}]))
    with refused(names=["uplink", "RelaySGD"]):
        prepare(experiment("relaysgd", topology=tree, uplink="topk"))
