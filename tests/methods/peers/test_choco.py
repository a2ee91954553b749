"""CHOCO-SGD against its equations, which recompute s = W h; its mean, its rate, its limit, its bits, its refusals."""

from typing import Any

import numpy as np
import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.random import RandK
from rayfl.compress.sparse import TopK
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import (
    Exponential,
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Topology,
)
from rayfl.topology.statistics import spectral_gap
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import start
from tests.methods.convex import DENSE_BITS, RATIO, SPARSE_BITS
from tests.methods.gossip import LINE, UPLINKS, Uplink, each, generators, mixing, of_states, trained, world
from tests.methods.plain_peers import DIM, NUM_PEERS, made, models
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2, "lr_decay": 0.9}
by_uplink = pytest.mark.parametrize("name", UPLINKS)


def followed(here: Setup, uplink: Uplink, gamma: float, order: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """All models and all public copies [4, 10] after every round."""
    assert here.topology is not None
    weights = mixing(here.topology)
    x = np.tile(start(here), (NUM_PEERS, 1))
    hyper: Any = here.method.hyper
    copies, seen = np.zeros_like(x) if hyper.hats == "zero" else x, []
    for round in range(here.rounds):
        y = trained(here, round, x)
        if order == "mix_first":
            y = y + gamma * (weights @ copies - copies)
        copies = copies + each(uplink.encoded, y - copies, generators(here, round))
        x = y if order == "mix_first" else y + gamma * (weights @ copies - copies)
        seen.append((x, copies))
    return seen


@pytest.mark.parametrize(
    ("topology", "order", "own"),
    [
        (Ring(), "exchange_first", {}),
        (Ring(), "mix_first", {"gamma": 0.2, "steps": 3}),
        (LINE, "exchange_first", {"gamma": 0.2, "epochs": 2, "hats": "zero"}),
        (LINE, "mix_first", {}),
    ],
    ids=str,
)
@by_uplink
def test_follows_its_equations(name: str, topology: Topology, order: str, own: dict[str, Any]):
    uplink = UPLINKS[name]
    hyper = {**HYPER, **own, "order": order}
    here = made("choco", hyper, rounds=6, topology=topology, uplink=uplink.uplink)
    weights = mixing(topology)
    expected = followed(here, uplink, own.get("gamma", uplink.delta), order)
    for run_state, (x, copies) in zip(play(here)[1], expected, strict=True):
        np.testing.assert_allclose(models(here, run_state), x, atol=1e-5)
        found = of_states(here, run_state, "hats", "model")
        np.testing.assert_allclose(found, copies, atol=1e-5)
        np.testing.assert_allclose(of_states(here, run_state, "means", "model"), weights @ found, atol=2e-6)


def gossiping(topology: Topology, gamma: float, name: str, rounds: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gossip alone: all models before and after every round, from different ones, and all copies, at first 0."""
    # A step of 1e-12 is lost in float32.
    here = made("choco", {"lr": 1e-12, "gamma": gamma}, rounds=rounds, topology=topology, uplink=UPLINKS[name].uplink)
    x, zeros = np.random.default_rng(0).standard_normal((NUM_PEERS, DIM)), np.zeros((NUM_PEERS, DIM))
    _, run_states = play(here, run_state=world(here, x, hats={"model": zeros}, means={"model": zeros}))
    after = [models(here, run_state) for run_state in run_states]
    return [x, *after], [of_states(here, run_state, "hats", "model") for run_state in run_states]


def test_an_uplink_that_states_no_delta_counts_as_one_of_a_tenth():
    half = Dense(dtype="fp16")
    assert half.expected_delta(DIM) is None
    left_out, given = (made("choco", {**HYPER, **own}, rounds=3, uplink=half) for own in ({}, {"gamma": 0.1}))
    without, with_it = (models(here, play(here)[1][-1]) for here in (left_out, given))
    np.testing.assert_array_equal(without, with_it)


@pytest.mark.parametrize(("topology", "name", "factor"), [(Ring(), "randk", 0.01), (LINE, "topk", 0.1)], ids=str)
def test_the_mean_stays_and_all_peers_come_to_it(topology: Topology, name: str, factor: float):
    x, _ = gossiping(topology, RATIO, name, 40)
    for now in x:
        np.testing.assert_allclose(now.mean(axis=0), x[0].mean(axis=0), atol=5e-6)
    apart = [np.linalg.norm(now - now.mean(axis=0)) for now in x]
    assert apart[-1] < factor * apart[0]


def test_gossip_converges_at_the_rate_of_its_theorem():
    """Theorem 2: e_t <= (1 - rho^2 delta / 82)^t e_0, where e_t = sum_i ||x_i - mean||^2 + ||x_i - h_i||^2, with the
    copies h_i that have moved by x_i."""
    weights = mixing(Ring())
    rho, beta, delta = spectral_gap(weights), np.linalg.norm(np.eye(NUM_PEERS) - weights, 2), RATIO
    gamma = rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
    x, copies = gossiping(Ring(), float(gamma), "topk", 50)
    errors = [((now - now.mean(axis=0)) ** 2).sum() + ((now - h) ** 2).sum() for now, h in zip(x, copies, strict=False)]
    bounds = (1 - rho**2 * delta / 82) ** np.arange(len(errors)) * errors[0]
    assert (errors <= bounds + 1e-6).all() and errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("topology", [Ring(), LINE, FullyConnected()], ids=lambda graph: graph.name)
def test_with_a_dense_uplink_and_gamma_1_it_is_dpsgd(topology: Topology):
    ours = made("choco", {**HYPER, "gamma": 1.0}, rounds=5, topology=topology)
    plain = made("dpsgd", HYPER, rounds=5, topology=topology)
    for one, other in zip(play(ours)[1], play(plain)[1], strict=True):
        np.testing.assert_allclose(models(ours, one), models(plain, other), atol=2e-6)


@pytest.mark.parametrize("method", ["choco", "beer", "deepsqueeze"])
def test_clients_with_shares_of_their_own_step_by_the_smallest_delta(method: str):
    clients, share = {"retention_ratio": [0.2, 0.5, 1.0]}, {"choco": 1.0, "beer": 0.5, "deepsqueeze": 0.1}[method]
    here = made(method, {"lr": 0.1}, rounds=4, uplink=TopK(), clients=clients)
    ratios = [here.population.traits(i).retention_ratio for i in range(NUM_PEERS)]
    assert min(ratios) < max(ratios)
    delta = TopK(keep_ratio=min(ratios)).delta(DIM)
    assert delta is not None
    given = made(method, {"lr": 0.1, "gamma": share * delta}, rounds=4, uplink=TopK(), clients=clients)
    records, run_states = play(here)
    np.testing.assert_array_equal(models(here, run_states[-1]), models(given, play(given)[1][-1]))
    sizes = [row.uplink_bits for row in records[-1].clients]
    assert sizes[ratios.index(min(ratios))] < sizes[ratios.index(max(ratios))]
    if method != "deepsqueeze":
        found = of_states(here, run_states[-1], "hats", "model")
        np.testing.assert_allclose(of_states(here, run_states[-1], "means", "model"), mixing(Ring()) @ found, atol=2e-6)


@pytest.mark.parametrize(("name", "bits"), [("dense", DENSE_BITS), ("topk", SPARSE_BITS), ("randk", SPARSE_BITS)])
def test_a_link_costs_one_compressed_model_each_way(name: str, bits: int):
    here = made("choco", HYPER, rounds=3, topology=LINE, uplink=UPLINKS[name].uplink)
    for record in play(here)[0]:
        assert [(row.uplink_bits, row.downlink_bits) for row in record.clients] == [
            (links * bits, links * bits) for links in (1, 2, 2, 1)
        ]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"clients": {"dropout_before_download": 0.1}}, ["clients.dropout_before_download", "every"]),
        ({"clients": {"dropout_after_training": 0.1}}, ["clients.dropout_after_training", "every"]),
        ({"clients": {"availability": {"probability": 0.9}}}, ["clients.availability", "every"]),
        ({"topology": RandomRegular(degree=2)}, ["topology='random-regular'", "the same in all rounds"]),
        ({"topology": OnePeerExponential()}, ["topology", "one-peer-exponential", "metropolis"]),
        ({"topology": Exponential()}, ["topology", "exponential", "symmetric"]),
        ({"topology": Grid(rows=1)}, ["topology", "grid", "weights='uniform'", "symmetric", "metropolis"]),
        ({"uplink": ErrorFeedback(inner=TopK())}, ["uplink", "feedback", "inside"]),
        ({"uplink": RandK(), "clients": {"retention_ratio": 0.5}}, ["clients.retention_ratio", "the same for all"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["choco", "beer"])
def test_what_would_part_the_copies_at_both_ends_is_refused(method: str, options: dict[str, Any], names: list[str]):
    with refused(names=[*names, method.upper()]):
        made(method, {}, **options)


def test_a_step_beyond_1_and_a_robust_mean_are_refused():
    with refused(names=["method.gamma", "1"]):
        experiment("choco", method={"name": "choco", "gamma": 1.5})
    with refused(names=["krum", "CHOCO", "mean"]):
        prepare(experiment("choco", wrap=[{"name": "krum"}]))
