"""FetchSGD against its equations in float64, against momentum and top k on the server where nothing collides, and the
bill of who missed steps."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet
from rayfl.compress.countsketch import hashes
from rayfl.compress.sparse import TopK
from rayfl.determinism.seeding import NOBODY, torch_seed
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, start
from tests.contracts.seams.quadratic import TRAIN
from tests.methods.averaging import made
from tests.methods.convex import CLIENTS
from tests.population.statuses import with_status
from tests.refusals import refused

LOSSES = {"per_round": 3, "dropout_after_training": 0.3}


def followed(here: Setup, exact: bool = False) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """x, U and E after every round, by the equations; the hashes are rayfl's. exact: of vectors in place of tables."""
    hyper = here.method.hyper.model_dump()
    a = np.zeros((hyper["rows"], hyper["columns"], 10))
    drawn = hashes(hyper["rows"], hyper["columns"], 10, torch_seed(here.seed, purpose="sketch"))
    for row, (cells, signs) in enumerate(drawn):
        a[row, cells, np.arange(10)] = signs
    if exact:
        assert (np.abs(a).sum(axis=2) <= 1).all(), "entries collide"
        a = np.eye(10)[None]
    x, u, e, seen = start(here), np.zeros(a.shape[:2]), np.zeros(a.shape[:2]), []
    for round in range(here.rounds):
        tables, weights = [], []
        for i in with_status(here.population.sample_round(round), "delivered"):
            (batch,) = batches(here, round, i, steps=1, batch_size=hyper["batch_size"] or TRAIN[i])
            tables.append(a @ (batch.gradient(x) + hyper["l2"] * x))
            weights.append(TRAIN[i] if hyper["weighting"] == "samples" else 1)
        if tables:
            u = hyper["momentum"] * u + np.average(tables, axis=0, weights=weights)
            e = e + hyper["lr"] * hyper["lr_decay"] ** round * u
            estimates = np.median(np.einsum("rcj,rc->rj", a, e), axis=0)
            # Entries of one cell may have the same estimate: then the first ones.
            kept = np.argsort(-np.abs(estimates), kind="stable")[: int(np.ceil(10 * hyper["keep_ratio"]))]
            delta = np.zeros(10)
            delta[kept] = estimates[kept]
            touched = a @ delta
            e = e - touched if hyper["error"] == "subtract" else np.where(touched == 0, e, 0)
            u = np.where(touched == 0, u, 0) if hyper["mask_momentum"] else u
            x = x - delta
        seen.append((x, u, e))
    return seen


@pytest.mark.parametrize("clients", [{}, LOSSES], ids=["all", "losses"])
@pytest.mark.parametrize(
    "hyper",
    [
        {"rows": 5, "columns": 7},
        {"rows": 3, "columns": 9, "error": "subtract", "mask_momentum": False, "momentum": 0.5, "lr_decay": 0.9},
        {"rows": 1, "columns": 6, "batch_size": 2, "weighting": "samples", "l2": 0.2, "mask_momentum": False},
    ],
    ids=str,
)
def test_follows_algorithm_1(hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fetchsgd", {"lr": 0.1, "keep_ratio": 0.3, **hyper}, rounds=8, clients=clients)
    records, run_states = play(here)
    expected = followed(here)
    for run_state, (x, u, e) in zip(run_states, expected, strict=True):
        np.testing.assert_allclose(flat(here.server_half.model(run_state.server)), x, atol=5e-6)
        np.testing.assert_allclose(run_state.server["momentum"], u, atol=5e-6)
        np.testing.assert_allclose(run_state.server["error"], e, atol=5e-6)
    assert np.abs(expected[-1][0] - start(here)).max() > 0.1
    # A count of examples where they are the weights.
    bits = 32 * hyper["rows"] * hyper["columns"] + (64 if hyper.get("weighting") else 0)
    sent = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {row.uplink_bits for row in sent} == {bits}


@pytest.mark.parametrize("keep_ratio", [0.1, 0.9])
def test_who_was_away_is_billed_the_steps_that_it_missed_or_x(keep_ratio: float):
    clients = {"per_round": 2, "dropout_before_download": 0.2, "dropout_after_training": 0.3}
    here = made("fetchsgd", {"columns": 7, "keep_ratio": keep_ratio}, rounds=20, clients=clients)
    records, run_states = play(here)
    top_k, draws = TopK(keep_ratio=keep_ratio, scope="model"), np.random.default_rng(0)
    # Nothing goes down in round 0, and then what the round before has found.
    sizes = [0, *(top_k.encode(one.server["step"], {}, draws)[0].num_bits for one in run_states[:-1])]
    assert all(32 * 10 * keep_ratio < size < 32 * 10 * keep_ratio + 64 for size in sizes[1:])
    had, late = dict.fromkeys(CLIENTS, 0), set[int]()
    for round, record in enumerate(records):
        for row in record.clients:
            if row.status == "dropped_before_download":
                assert row.downlink_bits == 0
                continue
            late.add(round - had[row.client])
            assert row.downlink_bits == min(sum(sizes[had[row.client] + 1 : round + 1]), 32 * 10), (round, row)
            had[row.client] = round
    assert {1, 2, 3} <= late


def test_clients_compute_their_gradients_at_x():
    """What goes down, added to what a client held before, has the bits of x."""
    here = made("fetchsgd", {"columns": 7, "keep_ratio": 0.3}, rounds=6, clients=LOSSES)
    for round, run_state in enumerate(play(here)[1]):
        ctx = here.context(round + 1, here.plan(round + 1), NOBODY, "server")
        packet = here.server_half.download(run_state.server, ctx)["step"]
        assert isinstance(packet, Packet)
        x = here.server_half.model(run_state.server)
        assert all(torch.equal(tensor, x[name]) for name, tensor in packet.decode().items())


@pytest.mark.parametrize("mask_momentum", [True, False])
@pytest.mark.parametrize("error", ["zero", "subtract"])
def test_without_collisions_it_is_top_k_with_momentum_and_an_error_memory(error: str, mask_momentum: bool):
    hyper = {"lr": 0.1, "keep_ratio": 0.2, "rows": 3, "columns": 20_011, "error": error, "mask_momentum": mask_momentum}
    here = made("fetchsgd", hyper, rounds=12, clients=LOSSES)
    for run_state, (x, _, _) in zip(play(here)[1], followed(here, exact=True), strict=True):
        np.testing.assert_allclose(flat(here.server_half.model(run_state.server)), x, atol=5e-6)


def test_a_round_without_messages_changes_nothing():
    here = made("fetchsgd", {"columns": 7}, rounds=12, clients={"per_round": 1, "dropout_after_training": 0.5})
    records, run_states = play(here)
    delivered = [record.row.delivered for record in records]
    # One that follows a step, which goes down then and is not taken again.
    assert (1, 0) in pairwise(delivered)
    for arrived, before, after in zip(delivered[1:], run_states, run_states[1:], strict=False):
        if not arrived:
            assert all(before.server[name] is after.server[name] for name in ("momentum", "error"))
            x, now = (here.server_half.model(one.server) for one in (before, after))
            assert all(torch.equal(x[name], now[name]) for name in x)


def test_sizes_that_are_none():
    with refused(names=["rows", "2", "1, 3, 5"]):
        made("fetchsgd", {"rows": 2})
    with refused(names=["keep_ratio", "1.5"]):
        made("fetchsgd", {"keep_ratio": 1.5})
