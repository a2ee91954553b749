"""FedPSE with clients that come and go: what they missed, and what it costs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.run_state import RunState
from rayfl.rounds.setup import Setup
from rayfl.run_directory.play_run import final_models
from rayfl.testing.executors import assert_same_bits, leaves, play, rows
from rayfl.testing.watching import watched
from tests.contracts.seams.closed_form import TENSORS, flat
from tests.methods.own_models import CLIENTS, made, personal
from tests.population.statuses import with_status

ABSENCES = ({"per_round": 2}, {"dropout_before_download": 0.3, "dropout_after_training": 0.2, "upload_loss": 0.2})


def fedpse(clients: dict[str, Any], **hyper: Any) -> Setup:
    return made("fedpse", {"lr": 0.1, "batch_size": 2, **hyper}, rounds=8, clients=clients)


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_with_every_entry_it_is_fedavg(clients: dict[str, Any]):
    # k = n: G_hat = G and D_i = G, so that W_i is W^0 minus all G so far, FedAvg's model, whoever was away. A client
    # that was there has it at once, the others when they are next selected.
    here, plain = (
        fedpse(clients, keep_ratio=1.0),
        made("fedavg", {"lr": 0.1, "batch_size": 2}, rounds=8, clients=clients),
    )
    away = 0
    for round, (state, other) in enumerate(zip(play(here)[1], play(plain)[1], strict=True)):
        own, x = personal(here, state, "base"), flat(other.server["params"])
        there = with_status(here.population.sample_round(round), "delivered")
        for i in there:
            np.testing.assert_allclose(own[i], x, rtol=1e-5, atol=1e-5)
        away += len(CLIENTS) - len(there)
    assert away > 4


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_who_comes_back_gets_the_sum_of_what_it_missed(clients: dict[str, Any]):
    here, log = watched(fedpse(clients, keep_ratio=0.3))
    records, states = play(here)
    had, total, caught_up = np.zeros((4, 10)), np.zeros(10), 0
    for round, (record, state) in enumerate(zip(records, states, strict=True)):
        arrived = {row.client for row in record.clients if row.status == "delivered"}
        for i in arrived:
            first, *rest = log.down[round, i]
            missed = total - had[i]
            if np.abs(missed).max() > 1e-6:
                packet = first["missed"]
                np.testing.assert_allclose(flat(packet.decode()), missed, atol=1e-6)
                # One number for every entry that any of the missed G_hat had.
                assert packet.num_bits <= 32 * np.count_nonzero(np.abs(missed) > 0) + 8 * 4
                caught_up += 1
            else:
                assert not first
            assert len(rest) == 1 and "update" in rest[0]
        top = tree.map(lambda mask: mask.float(), state.server["support"])
        total = total + flat(tree.mul(state.server["update"], top))
        for i in arrived:
            had[i] = total
        np.testing.assert_allclose(flat(state.server["sum"]), total, atol=1e-6)
    assert caught_up > 2


RATIOS = (0.1, 0.3, 0.6, 0.9)


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_who_comes_back_gets_its_own_share_of_what_it_missed(scope: str):
    here, log = watched(fedpse({"per_round": 2, "retention_ratio": list(RATIOS)}, scope=scope, keep_ratio=0.3))
    records, states = play(here)
    had, total, caught_up = np.zeros((4, 10)), np.zeros(10), set()
    for round, (record, state) in enumerate(zip(records, states, strict=True)):
        arrived = {row.client for row in record.clients if row.status == "delivered"}
        for i in arrived:
            first, _ = log.down[round, i]
            missed = total - had[i]
            blocks = TENSORS if scope == "tensor" else (slice(0, 10),)
            kept = np.zeros(10, bool)
            for block in blocks:
                k = math.ceil(RATIOS[i] * len(missed[block]) - 1e-9)
                largest = np.argsort(-np.abs(missed[block]), kind="stable")[:k]
                kept[block.start + largest] = np.abs(missed[block][largest]) > 1e-7
            found = flat(first["missed"].decode()) if first else np.zeros(10)
            np.testing.assert_allclose(found, np.where(kept, missed, 0), atol=1e-6)
            # Never more entries than its reply may have, and as many where it has missed so many.
            assert np.count_nonzero(found) == kept.sum()
            caught_up |= {i} if first else set()
        total = total + flat(state.server["update"])
        for i in arrived:
            had[i] = total
    assert caught_up == {0, 1, 2, 3}


def test_more_rounds_give_the_models_of_a_longer_run():
    # Some who train in round 2, the last one of the shorter run, are away in rounds 3 to 5.
    longer = replace(fedpse({"per_round": 2}, keep_ratio=0.3), rounds=6)
    shorter = replace(longer, rounds=3)
    early = set(with_status(longer.population.sample_round(2), "delivered"))
    late = {i for round in range(3, 6) for i in with_status(longer.population.sample_round(round), "delivered")}
    assert early - late

    def models(here: Setup, run_state: RunState) -> dict[str, list[Any]]:
        saved = final_models(here, InlineExecutor(here), run_state)["personal"]
        return {name: tensor.tolist() for part in saved for name, tensor in part.items()}

    straight = play(longer)[1]
    first = play(shorter)[1][-1]
    further = play(longer, run_state=first)[1][-1]
    assert models(longer, further) == models(longer, straight[-1])
    # Who trained in the last round of the shorter run has the trained model there, and not its next base.
    assert models(shorter, first) != models(longer, straight[2])


def test_on_request_nothing_comes_down_for_what_was_missed():
    here, log = watched(fedpse({"per_round": 2}, absent="nothing"))
    play(here)
    assert {name for row in log.down.values() for message in row for name in message} == {"update"}
    assert not here.server_half.overrides("personal_message")


@pytest.mark.parametrize("keep_ratio", [0.3, 1.0])
def test_where_all_deliver_nobody_has_anything_to_catch_up_with(keep_ratio: float):
    ways = [fedpse({}, keep_ratio=keep_ratio, absent=absent) for absent in ("catch_up", "nothing")]
    (records, run_states), (others, other_states) = (play(here) for here in ways)
    assert rows(records) == rows(others)
    for client, state in run_states[-1].states.items():
        assert_same_bits(leaves("state", state), leaves("state", other_states[-1].states[client]))
