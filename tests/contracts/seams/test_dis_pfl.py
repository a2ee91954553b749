"""Peers average entry by entry over those whose mask holds the entry, and move their masks."""

import math

import numpy as np
import pytest

from rayfl import tree
from rayfl.setup import Setup
from rayfl.topology import FullyConnected, RandomNeighbours, Topology
from tests.contracts.executors import play
from tests.contracts.seams.closed_form import TENSORS, batches, flat, start
from tests.contracts.seams.dis_pfl import DisPFL
from tests.contracts.seams.quadratic import setup
from tests.contracts.seams.ways import Way

ROUNDS, LR = 5, 0.1
HYPER = {"lr": LR, "epochs": 2, "batch_size": 3, "density": 0.5, "anneal": 0.5}


def first_masks(setup: Setup) -> np.ndarray:
    """The masks [4, 10] that the seed gives: a matter of data, like the order of batches."""
    return np.array([flat(setup.first_state(client)["mask"]) > 0 for client in range(4)])


def search(mask: np.ndarray, w: np.ndarray, gradient: np.ndarray, share: float) -> np.ndarray:
    new = mask.copy()
    for tensor in TENSORS:
        kept = np.flatnonzero(mask[tensor])
        num_moved = math.ceil(share * len(kept))
        new[tensor.start + kept[np.argsort(np.abs(w[tensor][kept]))[:num_moved]]] = False
        idle = np.flatnonzero(~new[tensor])
        order = np.argsort(-np.abs(gradient[tensor][idle]), kind="stable")
        new[tensor.start + idle[order[:num_moved]]] = True
    return new


def expected(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """All weights [4, 10] after the last exchange, and the masks of the next training [4, 10]."""
    masks = first_masks(setup)
    weights = start(setup) * masks
    for round in range(ROUNDS):
        here = set(setup.population.draw(round, everyone=True).among("delivered"))
        share = 0.25 * (1 + math.cos(math.pi * round / ROUNDS))
        trained, used = weights.copy(), masks.copy()
        for i in range(4):
            w = weights[i]
            for batch in batches(setup, round, i, epochs=2, batch_size=3):
                w = (w - LR * batch.gradient(w)) * masks[i]
            (batch,) = batches(setup, round, i, "search", steps=1, batch_size=3)
            masks[i], trained[i] = search(masks[i], w, batch.gradient(w), share), w
        assert setup.topology is not None
        graph = setup.topology.receives(4, setup.seed, round)
        for i in range(4):
            heard = [i, *(j for j in np.flatnonzero(graph[i]) if j in here)] if i in here else [i]
            counts = used[heard].sum(axis=0)
            average = np.where(counts > 0, trained[heard].sum(axis=0) / np.maximum(counts, 1), 0)
            weights[i] = average * masks[i]
    return weights, masks


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("topology", [FullyConnected(), RandomNeighbours(degree=2)], ids=lambda graph: graph.name)
def test_dis_pfl_follows_its_equations(way: Way, topology: Topology, dropout: float):
    clients = {"dropout_before_download": dropout}
    here = setup(DisPFL, rounds=ROUNDS, engine=way.engine, topology=topology, hyper=HYPER, clients=clients)
    weights, masks = expected(here)
    executor = way.executor(here)
    records, worlds = play(here, executor)
    states = [tree.to_tensors(executor.get(worlds[-1].states[client])) for client in range(4)]
    np.testing.assert_allclose([flat(state["params"]) for state in states], weights, rtol=1e-4, atol=1e-5)
    assert np.array_equal([flat(state["mask"]) > 0 for state in states], masks)
    # The number of kept entries never changes: half of 8 and half of 2.
    assert (masks[:, TENSORS[0]].sum(axis=1) == 4).all() and (masks[:, TENSORS[1]].sum(axis=1) == 1).all()
    assert (masks != first_masks(here)).any()
    assert dropout == 0.0 or min(record.row.delivered for record in records) < 4


def test_a_link_costs_the_kept_values_and_one_bit_an_entry(way: Way):
    here = setup(DisPFL, rounds=2, engine=way.engine, topology=RandomNeighbours(degree=2), hyper=HYPER)
    records, _ = play(here, way.executor(here))
    # 5 values of 4 bytes; a bitmap of 8 entries in 1 byte and its label; 1 position of 2 in 1 byte and its label.
    link = 8 * (5 * 4 + 2 + 2)
    for record in records:
        assert [client.downlink_bits for client in record.clients] == [2 * link] * 4
        assert record.row.uplink_bits == 4 * 2 * link
