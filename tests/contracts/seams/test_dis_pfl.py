"""Dis-PFL on quadratics: peers average entry by entry over those whose mask holds the entry, and move their masks."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.masks.dispfl import DisPFL
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import FullyConnected, RandomNeighbours, Topology
from tests.contracts.seams.closed_form import TENSORS, batches, flat, start
from tests.contracts.seams.quadratic import setup
from tests.contracts.seams.ways import Way
from tests.population.statuses import with_status

ROUNDS, LR, DECAY, WEIGHT_DECAY, MOMENTUM = 5, 0.1, 0.9, 0.05, 0.4
HYPER: Mapping[str, Any] = {
    "lr": LR,
    "lr_decay": DECAY,
    "weight_decay": WEIGHT_DECAY,
    "momentum": MOMENTUM,
    "epochs": 2,
    "batch_size": 3,
}


def first_masks(setup: Setup) -> np.ndarray:
    """The masks [4, 10] that the seed gives: a matter of data, like the order of batches."""
    return np.array([flat(setup.first_state(client)["mask"]) > 0 for client in range(4)])


def search(mask: np.ndarray, w: np.ndarray, gradient: np.ndarray | None, share: float, draw: Any) -> np.ndarray:
    new = mask.copy()
    for tensor in TENSORS:
        kept = np.flatnonzero(mask[tensor])
        if len(kept) == len(mask[tensor]):
            continue
        num_moved = math.ceil(share * len(kept))
        new[tensor.start + kept[np.argsort(-np.abs(w[tensor][kept]), kind="stable")[len(kept) - num_moved :]]] = False
        idle = np.flatnonzero(~new[tensor])
        if gradient is None:
            chosen = draw.choice(len(idle), num_moved, replace=False)
        else:
            chosen = np.argsort(-np.abs(gradient[tensor][idle]), kind="stable")[:num_moved]
        new[tensor.start + idle[chosen]] = True
    return new


def expected(setup: Setup, regrow: str = "gradient") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All weights [4, 10] after the last exchange, the masks of the next training, and the weights trained last."""
    masks = first_masks(setup)
    weights, trained = start(setup) * masks, start(setup) * masks
    for round in range(ROUNDS):
        here = set(with_status(setup.population.sample_round(round, everyone=True), "delivered"))
        share, lr = 0.25 * (1 + math.cos(math.pi * round / ROUNDS)), LR * DECAY**round
        used = masks.copy()
        for i in range(4):
            w, velocity, gradient = weights[i], np.zeros(10), None
            for batch in batches(setup, round, i, epochs=2, batch_size=3):
                velocity = MOMENTUM * velocity + batch.gradient(w) + WEIGHT_DECAY * w
                w = (w - lr * velocity) * masks[i]
            if regrow == "gradient":
                (batch,) = batches(setup, round, i, "search", steps=1, batch_size=3)
                gradient = batch.gradient(w)
            draw = seeding.generator(setup.seed, round, i, "client")
            masks[i], trained[i] = search(masks[i], w, gradient, share, draw), w
        assert setup.topology is not None
        graph = setup.topology.receives(4, setup.seed, round)
        for i in range(4):
            heard = [i, *(j for j in np.flatnonzero(graph[i]) if j in here)] if i in here else [i]
            counts = used[heard].sum(axis=0)
            average = np.where(counts > 0, trained[heard].sum(axis=0) / np.maximum(counts, 1), 0)
            weights[i] = average * masks[i]
    return weights, masks, trained


@pytest.mark.parametrize("regrow", ["gradient", "random"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("topology", [FullyConnected(), RandomNeighbours(degree=2)], ids=lambda graph: graph.name)
def test_dis_pfl_follows_its_equations(way: Way, topology: Topology, dropout: float, regrow: str):
    # The quarters, halves, ... of 10 entries. ERK has raw densities 6/8 and 1: eps = 10 d / 8, at most 1.
    clients = {"dropout_before_download": dropout, "retention_ratio": [0.25, 0.5, 0.75, 1.0]}
    hyper = {**HYPER, "regrow": regrow}
    here = setup(DisPFL, rounds=ROUNDS, engine=way.engine, topology=topology, hyper=hyper, clients=clients)
    weights, masks, trained = expected(here, regrow)
    executor = way.executor(here)
    records, run_states = play(here, executor)
    states = [tree.to_tensors(executor.get(run_states[-1].states[client])) for client in range(4)]
    np.testing.assert_allclose([flat(state["params"]) for state in states], weights, rtol=1e-4, atol=1e-5)
    assert np.array_equal([flat(state["mask"]) > 0 for state in states], masks)
    np.testing.assert_allclose(
        [flat(model) for _, model in personal_models(here, executor, run_states[-1])], trained, rtol=1e-4, atol=1e-5
    )
    # 0.25: int(0.3125 * 0.75 * 8) and int(0.3125 * 2); 0.5: 3.75, 1.25; 0.75: 5.625, 1.875; 1: everything.
    for run_state in run_states:
        found = [tree.to_tensors(executor.get(run_state.states[client]))["mask"] for client in range(4)]
        counts = [(int(mask["weight"].sum()), int(mask["bias"].sum())) for mask in found]
        assert counts == [(1, 0), (3, 1), (5, 1), (8, 2)]
    assert (masks != first_masks(here)).any()
    assert dropout == 0.0 or min(record.row.delivered for record in records) < 4


def test_a_link_costs_the_kept_values_and_one_bit_an_entry(way: Way):
    hyper = {**HYPER, "distribution": "uniform"}
    here = setup(DisPFL, rounds=2, engine=way.engine, topology=RandomNeighbours(degree=2), hyper=hyper)
    records, _ = play(here, way.executor(here))
    # 5 values of 4 bytes; a bitmap of 8 entries in 1 byte and its label; 1 position of 2 in 1 byte and its label.
    server_memory = 8 * (5 * 4 + 2 + 2)
    for record in records:
        assert [client.downlink_bits for client in record.clients] == [2 * server_memory] * 4
        assert record.row.uplink_bits == 4 * 2 * server_memory
        # What the paper counts: the values of two links, 1 MB = 1e6 bytes.
        assert record.means["comm/busiest_received_megabytes"] == pytest.approx(2 * 5 * 4 / 1e6)
