"""BEER against the paper's order of steps; its invariant, its exact minimiser beside CHOCO's floor, its bits."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import Ring, Topology
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import batches, points, start
from tests.methods.convex import DENSE_BITS, SPARSE_BITS
from tests.methods.gossip import LINE, UPLINKS, Uplink, each, generators, mixing, of_states
from tests.methods.plain_peers import NUM_PEERS, made, models
from tests.refusals import refused


def gradients(here: Setup, round: int, x: np.ndarray) -> np.ndarray:
    """u [4, 10]: every peer's gradient on its batch of a round."""
    size: Any = here.method.hyper.batch_size or 100  # type: ignore[attr-defined]
    return np.array([batches(here, round, i, steps=1, batch_size=size)[0].gradient(x[i]) for i in range(NUM_PEERS)])


def followed(here: Setup, uplink: Uplink, gamma: float) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Algorithm 1 in the paper's order: after every round all x, all v before they move, and all copies of v."""
    hyper: Any = here.method.hyper
    assert here.topology is not None
    weights, ones = mixing(here.topology), np.ones((NUM_PEERS, 10))
    x = np.tile(start(here), (NUM_PEERS, 1))
    h, g, seen = np.zeros_like(x) if hyper.hats == "zero" else x, np.zeros_like(x), []
    u = v = gradients(here, 0, x)
    for round in range(here.rounds):
        eta = hyper.lr * hyper.lr_decay**round
        x = x + gamma * (weights @ h - h) - eta * v
        seen.append((x, v, g))
        sources = generators(here, round)
        h = h + each(uplink.encoded, x - h, sources)
        if round + 1 == here.rounds:
            break
        new = gradients(here, round + 1, x)
        v, u = v + gamma * (weights @ g - g) + new - u, new
        # rayfl sends r with the q of the next round, whose draws come first.
        sources = generators(here, round + 1)
        each(uplink.encoded, ones, sources)
        g = g + each(uplink.encoded, v - g, sources)
    return seen


@pytest.mark.parametrize(
    ("topology", "own"),
    [(Ring(), {"batch_size": 2}), (LINE, {"gamma": 0.1, "lr_decay": 0.9, "hats": "zero"})],
    ids=str,
)
@pytest.mark.parametrize("name", UPLINKS)
def test_follows_its_equations(name: str, topology: Topology, own: dict[str, Any]):
    uplink = UPLINKS[name]
    here = made("beer", {"lr": 0.05, **own}, rounds=6, topology=topology, uplink=uplink.uplink)
    weights = mixing(topology)
    expected = followed(here, uplink, own.get("gamma", 0.5 * uplink.delta))
    before = np.tile(start(here), (NUM_PEERS, 1))
    for round, (run_state, (x, v, g)) in enumerate(zip(play(here)[1], expected, strict=True)):
        np.testing.assert_allclose(models(here, run_state), x, atol=1e-5)
        u = gradients(here, round, before)
        drift = of_states(here, run_state, "drift")
        np.testing.assert_allclose(drift + u, v, atol=1e-5)
        np.testing.assert_allclose(of_states(here, run_state, "hats", "tracker"), g, atol=1e-5)
        for of in ("model", "tracker"):
            copies = of_states(here, run_state, "hats", of)
            np.testing.assert_allclose(of_states(here, run_state, "means", of), weights @ copies, atol=2e-6)
        # The invariant: the mean of v is the mean of u.
        np.testing.assert_allclose(drift.mean(axis=0), 0, atol=1e-6)
        before = x


def test_it_finds_the_minimiser_that_choco_only_comes_near():
    """f_i = a_i / 2 (x - c_i)^2, by entry: the minimiser of their sum is sum a_i c_i / sum a_i."""
    uplink, step = UPLINKS["topk"].uplink, {"lr": 0.1, "gamma": 0.3}
    ours = made("beer", step, rounds=100, uplink=uplink)
    mine = [points(ours, i) for i in range(NUM_PEERS)]
    curvature = np.array([one.hessian() for one in mine])
    minimiser = np.array([(one.a * one.c).mean(axis=0) for one in mine]).sum(axis=0) / curvature.sum(axis=0)
    assert np.abs(np.array([one.gradient(minimiser) for one in mine])).max() > 0.3
    last = play(ours)[1][-1]
    np.testing.assert_allclose(models(ours, last), np.tile(minimiser, (NUM_PEERS, 1)), atol=5e-4)
    np.testing.assert_allclose(of_states(ours, last, "hats", "tracker"), 0, atol=2e-3)
    choco = made("choco", {**step, "batch_size": 0, "steps": 1}, rounds=60, uplink=uplink)
    assert np.abs(models(choco, play(choco)[1][-1]) - minimiser).max() > 0.02


@pytest.mark.parametrize(("name", "bits"), [("dense", DENSE_BITS), ("topk", SPARSE_BITS), ("randk", SPARSE_BITS)])
def test_a_link_costs_two_compressed_trees_each_way_and_one_in_round_0(name: str, bits: int):
    here = made("beer", {}, rounds=3, topology=LINE, uplink=UPLINKS[name].uplink)
    for round, record in enumerate(play(here)[0]):
        sent = bits * (2 if round else 1)
        assert [(row.uplink_bits, row.downlink_bits) for row in record.clients] == [
            (links * sent, links * sent) for links in (1, 2, 2, 1)
        ]


def test_a_share_of_its_one_step_is_refused():
    # test_choco.py has what both refuse.
    with refused(names=["clients.work", "BEER", "one step"]):
        experiment("beer", clients={"work": "capacity"})
