"""Robust means among peers, with the own message as the reference: by hand, under the engine, against attacks."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.experiment.prepare import prepare
from rayfl.gather import RobustMean
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.rounds.mix import robust_rows
from rayfl.rounds.setup import Setup
from rayfl.testing.contracts import several_workers_give_the_bits_of_one
from rayfl.testing.executors import play
from rayfl.topology.graphs import FullyConnected, Grid, RandomNeighbours, Ring
from rayfl.topology.mixing import mixing_weights
from rayfl.wrappers.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    RobustWrapper,
    TrimmedMean,
)
from tests.contracts.every_method import experiment
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.methods.plain_peers import DIM, NUM_PEERS, models, world_of
from tests.refusals import refused

FIVE = [0.0, 1.0, 2.0, 3.0, 100.0]
PATH = mixing_weights(Grid(rows=1).receives(3, 0, 0), "metropolis").toarray()


def mixed(rule: RobustMean, values: list[float], weights: np.ndarray, uplink: Any = None) -> list[float]:
    """What every peer makes of numbers, one for each peer."""
    source = np.random.default_rng(0)
    packets = {
        i: (uplink or Dense()).encode({"x": torch.full((3,), value), "y": torch.full((2, 2), value)}, {}, source)[0]
        for i, value in enumerate(values)
    }
    rows = [{j: float(weights[i, j]) for j in np.flatnonzero(weights[i]).tolist()} for i in range(len(values))]
    results = [total.result for total in robust_rows(rule, packets, rows, range(len(values)))]
    assert all(result["y"].shape == (2, 2) and result["x"].allclose(result["y"][0, 0]) for result in results)
    return [float(result["x"][0]) for result in results]


@pytest.mark.parametrize(
    ("rule", "values", "weights", "expected"),
    [
        # One of five is dropped at each end.
        (TrimmedMean(trim=0.2), FIVE, np.full((5, 5), 0.2), [2.0] * 5),
        # BRIDGE: of the four others one at each end, and then the own one joins.
        (TrimmedMean(trim=0.25, own="outside"), FIVE, np.full((5, 5), 0.2), [5 / 3, 2, 2, 2, 103 / 3]),
        (CoordinateMedian(), FIVE, np.full((5, 5), 0.2), [2.0] * 5),
        (CoordinateMedian(), [0.0, 1.0, 10.0], PATH, [0.5, 1.0, 5.5]),
        (Krum(byzantine=1), FIVE, np.full((5, 5), 0.2), [1.0] * 5),
        # y_i + sum_j W_ij clip(y_j - y_i, 2): 0 + 1/3, 1 + (-1 + 2)/3, 10 - 2/3. A message repeats its number 7 times.
        (CenteredClipping(radius=2.0 * 7**0.5), [0.0, 1.0, 10.0], PATH, [1 / 3, 4 / 3, 28 / 3]),
        (CenteredClipping(radius=1e9), [0.0, 1.0, 10.0], PATH, (PATH @ [0.0, 1.0, 10.0]).tolist()),
        # Peer 1 may hear 1/6 of attackers: of the weights 1/3 and 1/3 of the distances 1 and 9 the nearest 1/2 counts,
        # tau^2 = 6 (1/3 + 1/6 81) = 83, and 9 is below sqrt(83). Peer 0: tau^2 = 6 (1/6) = 1; peer 2: 81, so 9.
        (CenteredClipping(attacking=1 / 6), [0.0, 1.0, 10.0], PATH, [1 / 3, 11 / 3, 7.0]),
    ],
    ids=str,
)
def test_a_round_by_hand(rule: RobustMean, values: list[float], weights: np.ndarray, expected: list[float]):
    assert mixed(rule, values, weights) == pytest.approx(expected, abs=1e-5)
    # Packets that cannot be read in pieces, too.
    assert mixed(rule, values, weights, TopK(keep_ratio=1.0)) == pytest.approx(expected, abs=1e-5)


def test_an_attacker_moves_a_neighbour_by_its_weight_times_the_radius_and_the_sum_is_kept():
    values, far = [0.3, 1.0, -0.5], [0.3, 1.0, 1e6]
    rule = CenteredClipping(radius=0.4)
    assert sum(mixed(rule, values, PATH)) == pytest.approx(sum(values), abs=1e-6)
    honest, attacked = mixed(rule, values, PATH), mixed(rule, far, PATH)
    assert attacked[0] == honest[0]
    assert abs(attacked[1] - honest[1]) <= 2 * PATH[1, 2] * 0.4 + 1e-6


def wrapped(rule: RobustWrapper, **options: Any) -> Setup:
    return setup(rule.around(DPSGD(Quadratic(), lr=1e-9)), rounds=2, **options)


def test_the_engine_mixes_by_the_rule():
    x = np.random.default_rng(2).standard_normal((NUM_PEERS, DIM))
    clients = {"dropout_before_download": 0.4}
    here = wrapped(CoordinateMedian(), topology=RandomNeighbours(degree=2), clients=clients)
    expected = x
    for round, run_state in enumerate(play(here, run_state=world_of(x, here))[1]):
        statuses = here.population.sample_round(round, everyone=True).statuses
        present = [i for i in range(NUM_PEERS) if statuses[i].value == "delivered"]
        graph = here.topology.receives(NUM_PEERS, here.seed, round)  # type: ignore[union-attr]
        rows = {i: [i, *(j for j in present if graph[i, j])] if i in present else [i] for i in range(NUM_PEERS)}
        expected = np.array([np.median(expected[rows[i]], axis=0) for i in range(NUM_PEERS)])
        np.testing.assert_allclose(models(here, run_state), expected, atol=1e-5)


def test_peers_that_hear_the_same_still_have_their_own_reference():
    x = np.array([0.0, 1.0, 2.0, 30.0])[:, None] * np.ones(DIM)
    here = wrapped(CenteredClipping(radius=np.sqrt(DIM)), topology=FullyConnected())
    first = play(here, run_state=world_of(x, here))[1][0]
    # y_i + sum_j clip(y_j - y_i, 1) / 4.
    np.testing.assert_allclose(models(here, first)[:, 0], [0.75, 1.25, 1.75, 29.25], atol=1e-5)


ATTACK = {"name": "attack", "kind": "sign-flip", "share": 0.17, "strength": 10.0}


def final(rule: Any, **options: Any) -> float:
    tables = {"topology": "fully-connected", "rounds": 6, "method": {"name": "dpsgd", "lr": 0.1, "batch_size": 16}}
    here = prepare(experiment("dpsgd", partition="iid", wrap=[ATTACK, *rule], **tables, **options))
    records, _ = play(here)
    (value,) = (m.value for m in records[-1].metrics if m.name == "own/accuracy" and m.client is None)
    assert value is not None
    return value


def test_one_attacker_in_six_spoils_the_mean_and_not_robust_rules():
    plain = final([])
    rules = ("coordinate-median", "trimmed-mean", "krum", "geometric-median")
    assert plain < 0.5
    for rule in rules:
        assert final([{"name": rule}]) > plain + 0.2, rule
    assert final([{"name": "centered-clipping", "radius": 0.3}]) > plain + 0.2


@pytest.mark.parametrize("rule", ["krum", "centered-clipping", "trimmed-mean"])
def test_robust_means_do_not_depend_on_workers(rule: str):
    table = {"name": rule, "trim": 0.4} if rule == "trimmed-mean" else {"name": rule}
    graph = "fully-connected" if rule == "krum" else "ring"
    several_workers_give_the_bits_of_one(prepare(experiment("dpsgd", wrap=[ATTACK, table], topology=graph, rounds=2)))


@pytest.mark.parametrize(
    ("method", "rule", "topology", "names"),
    [
        ("sgp", {"name": "krum"}, "ring", ["krum", "SGP", "dpsgd"]),
        ("relaysgd", {"name": "coordinate-median"}, {"name": "grid", "rows": 1}, ["coordinate-median", "RelaySGD"]),
        ("dfedu", {"name": "krum"}, "ring", ["krum", "DFedU"]),
        ("dpsgd", {"name": "krum"}, "ring", ["krum", "5 messages per peer", "there are 3"]),
        ("dpsgd", {"name": "trimmed-mean"}, "ring", ["trim=0.2", "none of the 3 messages", "0.333"]),
        ("dpsgd", {"name": "trimmed-mean", "store_share": 0.1}, "ring", ["store_share", "peers"]),
        ("dpsgd", {"name": "centered-clipping", "steps": 2}, "ring", ["steps=2", "peers"]),
        ("dpsgd", {"name": "centered-clipping", "attacking": 0.7}, "ring", ["attacking=0.7", "0.667"]),
        ("dpsgd", {"name": "centered-clipping"}, {"name": "random", "degree": 2}, ["symmetric", "metropolis"]),
        ("fedavg", {"name": "centered-clipping", "attacking": 0.2}, None, ["attacking=0.2", "peers"]),
        ("fedavg", {"name": "trimmed-mean", "own": "outside"}, None, ["own='outside'", "server"]),
    ],
    ids=str,
)
def test_what_a_rule_cannot_do_is_refused(method: str, rule: dict[str, Any], topology: Any, names: list[str]):
    graph = {"topology": topology} if topology else {"method": {"name": "fedavg", "weighting": "uniform"}}
    with refused(names=names):
        prepare(experiment(method, wrap=[rule], **graph))


def test_the_geometric_median_of_a_neighbourhood():
    # Peer 0 of a ring of four hears 1 and 1: with its own 0 the point nearest to all is 1.
    ring = mixing_weights(Ring().receives(4, 0, 0), "uniform").toarray()
    assert mixed(GeometricMedian(), [0.0, 1.0, 10.0, 1.0], ring)[0] == pytest.approx(1.0, abs=0.02)


def test_absent_peers_change_weights_in_rounds_alone():
    clients = {"dropout_after_training": 0.2, "examples_per_s": 100.0}
    tables: dict[str, Any] = {"topology": "ring", "clients": clients, "wrap": [{"name": "centered-clipping"}]}
    assert prepare(experiment("dpsgd", schedule="gossip", **tables)).on_own_clocks
    with refused(names=["clients.dropout_after_training", "symmetric"]):
        prepare(experiment("dpsgd", **tables))
