"""FedPSE with clients that come and go: what they missed, and what it costs."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.rounds.setup import Setup
from rayfl.testing.comparison import assert_same_bits, leaves, rows
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from tests.contracts.seams.closed_form import flat
from tests.methods.personal import CLIENTS, made, personal
from tests.population.fates import with_fate

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
        there = with_fate(here.population.sample_round(round), "delivered")
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
