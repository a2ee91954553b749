"""D-PSGD: both orders against an independent simulation, means that are kept, and consensus at the spectral gap."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.data.datasets import Examples
from rayfl.population.sampling import Clients
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play
from rayfl.topology.graphs import (
    Grid,
    OnePeerExponential,
    RandomNeighbours,
    RandomRegular,
    Ring,
    Topology,
)
from rayfl.topology.mixing import mixing_weights
from rayfl.topology.statistics import spectral_gap
from tests.contracts.seams.closed_form import points
from tests.methods.plain_peers import ABSENCES, DIM, GRAPHS, followed, made, models, world_of
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2}
LINK = 8 * 4 * DIM
by_graph = pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: f"{graph.name}-{graph.weights}")


def assert_follows(here: Setup, expected: list[np.ndarray]) -> None:
    for run_state, x in zip(play(here)[1], expected, strict=True):
        np.testing.assert_allclose(models(here, run_state), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("order", ["lian", "average_first"])
@by_graph
def test_follows_its_equations(topology: Topology, order: str, clients: dict[str, Any]):
    here = made("dpsgd", {**HYPER, "order": order, "lr_decay": 0.9}, rounds=6, topology=topology, clients=clients)
    assert_follows(here, followed(here, default_steps=1 if order == "lian" else None))


@pytest.mark.parametrize("hyper", [{"steps": 3}, {"epochs": 2}], ids=str)
def test_more_steps_of_lian_add_up_what_they_moved_by(hyper: dict[str, Any]):
    here = made("dpsgd", {**HYPER, "order": "lian", **hyper}, rounds=4, clients=ABSENCES[1])
    assert_follows(here, followed(here))


def test_the_orders_by_hand():
    # One step of lr 0.5 with the whole split in a batch: f_i = h_i / 2 (x - c_i)^2, on the line 0 - 1 - 2 - 3.
    for order in ("lian", "average_first"):
        hyper = {"lr": 0.5, "batch_size": 0, "steps": 1, "order": order}
        here = made("dpsgd", hyper, rounds=1, topology=Grid(rows=1))
        x = np.arange(4.0)[:, None] * np.ones(DIM)
        step = 0.5 * np.array([points(here, i).gradient(x[i]) for i in range(4)])
        _, (run_state,) = play(here, run_state=world_of(x, here))
        source = x if order == "lian" else x - step
        mean = np.array([source[[0, 1]].mean(0), source[:3].mean(0), source[1:].mean(0), source[2:].mean(0)])
        expected = mean - step if order == "lian" else mean
        np.testing.assert_allclose(models(here, run_state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "topology",
    [Ring(), Grid(rows=1, weights="metropolis"), OnePeerExponential(), RandomRegular(degree=2)],
    ids=lambda graph: graph.name,
)
def test_doubly_stochastic_mixing_keeps_the_mean(topology: Topology):
    here = made("dpsgd", {"lr": 1e-12}, rounds=5, topology=topology)
    x = np.random.default_rng(0).standard_normal((4, DIM))
    _, run_states = play(here, run_state=world_of(x, here))
    for run_state in run_states:
        np.testing.assert_allclose(models(here, run_state).mean(axis=0), x.mean(axis=0), rtol=0, atol=2e-6)
    # And a graph that is not balanced does not: uniform weights on a line.
    here = replace(here, topology=Grid(rows=1))
    _, run_states = play(here, run_state=world_of(x, here))
    assert np.abs(models(here, run_states[-1]).mean(axis=0) - x.mean(axis=0)).max() > 0.01


@pytest.mark.parametrize("topology", [Ring(), Grid(rows=1, weights="metropolis")], ids=lambda graph: graph.name)
def test_peers_agree_at_the_rate_of_the_spectral_gap(topology: Topology):
    # f_i = (x - c_i)^2 / 2 and one step of lr: x(t+1) = W ((1 - lr) x(t) + lr c). Away from what it tends to, the
    # disagreement shrinks by (1 - lr) (1 - gap) a round: two runs on the same data differ by nothing else.
    lr, rounds = 0.1, 8
    here = made("dpsgd", {"lr": lr, "steps": 1, "batch_size": 0}, rounds=rounds, topology=topology)
    inputs = here.dataset.train.inputs.copy()
    inputs[:, 1] = 1.0
    examples = Examples(inputs, here.dataset.train.labels)
    here = replace(here, dataset=replace(here.dataset, train=examples, test=examples))
    starts = np.random.default_rng(1).standard_normal((2, 4, DIM))
    runs = [[models(here, run_state) for run_state in play(here, run_state=world_of(x, here))[1]] for x in starts]
    differences = [one - other for one, other in zip(*runs, strict=True)]
    apart = [np.linalg.norm(d - d.mean(axis=0)) for d in [starts[0] - starts[1], *differences]]
    rate = (1 - lr) * (1 - spectral_gap(mixing_weights(topology.receives(4, 0, 0), topology.weights)))
    assert (np.array(apart[1:]) <= rate * np.array(apart[:-1]) + 1e-6).all()
    assert apart[-1] / apart[-2] == pytest.approx(rate, rel=0.02)


def test_a_peer_that_is_away_trains_on_and_rejoins():
    here = made("dpsgd", HYPER, rounds=8, topology=Ring(), clients={"dropout_before_download": 0.4})
    records, run_states = play(here)
    away = [{row.client for row in record.clients if row.status != "delivered"} for record in records]
    trained = [models(here, run_state) for run_state in run_states]
    for round in range(1, 8):
        for client in away[round]:
            row = records[round].clients[client]
            assert (row.uplink_bits, row.downlink_bits) == (0, 0) and row.num_steps > 0
            assert np.abs(trained[round][client] - trained[round - 1][client]).max() > 1e-4
    assert any(away[round] - away[round + 1] for round in range(7))


def test_a_peer_that_vanishes_with_its_update_has_trained_for_nothing():
    clients = {"dropout_after_training": 0.4, "examples_per_s": [100.0, 100.0, 100.0, 1.0]}
    here = made("dpsgd", HYPER, rounds=8, topology=Ring(), clients=clients)
    records, run_states = play(here)
    full = play(replace(here, population=replace(here.population, settings=Clients(count=4))), rounds=1)[0][0]
    states = [models(here, run_state) for run_state in run_states]
    lost = [{row.client for row in record.clients if row.status == "dropped_after_training"} for record in records]
    for round in range(1, 8):
        for client in lost[round]:
            row = records[round].clients[client]
            assert (row.uplink_bits, row.downlink_bits) == (0, 0)
            assert row.num_steps == full.clients[client].num_steps > 0
            np.testing.assert_array_equal(states[round][client], states[round - 1][client])
            # The others wait until it is gone.
            assert records[round].row.simulated_s >= row.simulated_s == row.num_samples / [100, 1][client == 3]
    assert any(lost[round] - lost[round + 1] for round in range(7)) and any(3 in clients for clients in lost)


@pytest.mark.parametrize("order", ["lian", "average_first"])
def test_a_link_costs_four_bytes_a_parameter(order: str):
    here = made("dpsgd", {**HYPER, "order": order}, rounds=3, topology=RandomNeighbours(degree=2))
    records, _ = play(here)
    for round, record in enumerate(records):
        listeners = here.topology.receives(4, here.seed, round).sum(axis=0)  # type: ignore[union-attr]
        assert [row.downlink_bits for row in record.clients] == [2 * LINK] * 4
        assert [row.uplink_bits for row in record.clients] == (listeners * LINK).tolist()


def test_compressed_messages_are_the_compressed_change_since_the_start():
    # Dropped entries count as unchanged: with only the largest of each tensor sent, the others come back to x_0.
    here = made("dpsgd", {**HYPER, "lr": 0.3}, rounds=1, uplink=TopK(keep_ratio=0.1))
    full = replace(here, uplink=Dense())
    (record,), (run_state,) = play(here)
    local = models(full, play(replace(full, topology=Ring()), rounds=1)[1][0])
    x0 = here.initial
    moved = models(here, run_state) - np.concatenate([t.numpy().reshape(-1) for t in x0.values()])
    assert ((moved != 0).sum(axis=1) <= 3 * 2).all() and (moved != 0).any()
    assert np.abs(moved).max() <= np.abs(local - models(here, run_state) + moved).max() + 1e-6
    # A position of 8 in a bitmap of 1 byte and its label, one of 2 likewise; 2 numbers; 2 listeners.
    assert record.clients[0].uplink_bits == 2 * 8 * (2 * 4 + 2 + 2)


def test_half_precision_halves_the_links():
    here = made("dpsgd", HYPER, rounds=2, uplink=Dense(dtype="fp16"))
    records, run_states = play(here)
    assert {row.uplink_bits for record in records for row in record.clients} == {LINK}
    exact = models(here, play(replace(here, uplink=Dense()))[1][-1])
    np.testing.assert_allclose(models(here, run_states[-1]), exact, rtol=0, atol=5e-3)


@pytest.mark.parametrize("order", ["lian", "average_first"])
@by_graph
def test_three_workers_give_the_bits_of_one(topology: Topology, order: str):
    here = made("dpsgd", {**HYPER, "order": order}, topology=topology, clients=ABSENCES[2])
    one, many = InlineExecutor(here), Shuffled(here)
    assert_same_bits(contents(one, play(here, one)[1][-1]), contents(many, play(here, many)[1][-1]))


def test_the_order_is_one_of_two():
    with refused(names=["order='mixed'", "lian", "average_first"]):
        made("dpsgd", {"order": "mixed"})


@pytest.mark.parametrize("clients", ABSENCES[:2], ids=str)
@pytest.mark.parametrize("name", ["dpsgd", "dpsgd_ft", "dsgdprox"])
@pytest.mark.parametrize("order", ["average_first", "lian"])
def test_a_masked_model_moves_as_the_dense_one_of_those_entries(name: str, order: str, clients: dict[str, Any]):
    # On quadratics entries do not see each other, so that what is kept moves as without a mask and the rest is 0.
    hyper = {**HYPER, "momentum": 0.5, **({"order": order} if name != "dsgdprox" else {"epochs": 2})}
    dense, thin = (
        made(name, {**hyper, **given}, rounds=4, topology=Ring(), clients=clients)
        for given in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "density": 0.5})
    )
    first = thin.first_state(0)
    kept = np.concatenate([first["mask"][part].numpy().reshape(-1) for part in ("weight", "bias")])
    assert kept.sum() == 5
    for one, other, record in zip(play(dense)[1], play(thin)[1], play(thin)[0], strict=True):
        np.testing.assert_allclose(models(thin, other), np.where(kept, models(dense, one), 0.0), rtol=1e-5, atol=1e-6)
        # Four bytes for each of the five entries that all know to be there, and nothing for where they are.
        present = [row.client for row in record.clients if row.status == "delivered"]
        graph = Ring().receives(4, 0, 0)
        for row in record.clients:
            degree = sum(bool(graph[row.client, j]) for j in present) if row.client in present else 0
            assert row.uplink_bits == row.downlink_bits == degree * 32 * 5


def test_the_mask_comes_from_the_seed_and_fine_tuning_stays_inside():
    here = made("dpsgd_ft", {"lr": 0.1, "batch_size": 0, "density": 0.3, "distribution": "erk"}, topology=Ring())
    states = [here.first_state(client) for client in range(4)]
    for state in states[1:]:
        assert all(bool((state["mask"][name] == states[0]["mask"][name]).all()) for name in state["mask"])
    carry = here.method.eval_begin(states[0], here.initial, None, here.context(0, here.plan(0), 0, "judge"))
    assert set(carry) >= {"mask", "params"}
    with refused(names=["distribution='erk'", "density"]):
        made("dpsgd", {"distribution": "erk"})
