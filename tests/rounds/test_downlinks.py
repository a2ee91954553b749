"""A compressed downlink sends differences to what all clients hold, and bills each client what it missed."""

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Message, message_bits
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sign import ScaledSign
from rayfl.compress.sparse import TopK
from rayfl.determinism.seeding import NOBODY
from rayfl.methods.personal.l2gd import L2GD
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds import downlinks
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts
from rayfl.testing.executors import play
from rayfl.tree import State
from tests.contracts.every_method import FREE_DOWNLINKS, Case, cases
from tests.contracts.seams import quadratic
from tests.refusals import refused

ENTRIES = 40


def fedavg() -> FedAvg:
    return FedAvg(quadratic.Quadratic(), lr=0.1)


def send(setup: Setup, models: list[np.ndarray]) -> list[tuple[np.ndarray, Message, State]]:
    """What clients hold after the broadcast of each model, the message, and the downlink's state."""
    sent, state = [], {}
    for round, model in enumerate(models):
        context = setup.context(round, setup.plan(round), NOBODY, "server")
        message, state = downlinks.broadcast(setup, {"params": {"w": torch.from_numpy(model)}}, state, context)
        sent.append((message["model"].decode()["w"].numpy(), message, state))
    return sent


def largest(x: np.ndarray, count: int) -> np.ndarray:
    kept = np.zeros_like(x)
    at = np.argsort(-np.abs(x), kind="stable")[:count]
    kept[at] = x[at]
    return kept


@pytest.mark.parametrize("downlink", [TopK(keep_ratio=0.1), ErrorFeedback(inner=TopK(keep_ratio=0.1))])
def test_clients_hold_the_sum_of_the_differences(downlink: Compressor):
    draws = np.random.default_rng(3)
    models = list(np.cumsum(draws.standard_normal((12, ENTRIES)), axis=0, dtype=np.float32))
    setup = quadratic.setup(fedavg(), downlink=downlink)
    held = models[0]
    for model, (found, _, _) in zip(models, send(setup, models), strict=True):
        # Both forms send the same: what feedback remembers is what clients lack.
        held = held + largest(model - held, 4)
        np.testing.assert_allclose(found, held, atol=1e-5)


def test_a_model_that_stays_is_held_exactly_and_one_that_stops_is_reached():
    still, moved = np.ones(ENTRIES, np.float32), np.arange(ENTRIES, dtype=np.float32)
    for downlink in (TopK(keep_ratio=0.1), ErrorFeedback(inner=TopK(keep_ratio=0.1))):
        found = send(quadratic.setup(fedavg(), downlink=downlink), [still] * 3 + [moved] * 10)
        assert [np.array_equal(held, still) for held, _, _ in found[:3]] == [True] * 3
        assert np.array_equal(found[-1][0], moved) and not np.array_equal(found[-2][0], moved)


def test_who_missed_broadcasts_is_billed_all_of_them_or_the_model():
    models = [np.full(ENTRIES, number, np.float32) for number in range(30)]
    setup = quadratic.setup(fedavg(), downlink=ScaledSign())
    size, had, state = 0, {}, {}
    for round, (_, message, after) in enumerate(send(setup, models)):
        state = {**after, "had": state["had"]} if state else after
        asked = [round % 2, 2] if round < 25 else [0, 1, 2, 3]
        owed = downlinks.missed(state, message, asked)
        for client in asked:
            size = message_bits(message)
            missing = round - had.get(client, -100)
            expected = min(missing * size, 32 * ENTRIES) if round else 32 * ENTRIES
            assert size + owed[client].bits == expected, (round, client)
            assert message["model"].num_values + owed[client].values == (
                missing * ENTRIES if expected < 32 * ENTRIES else ENTRIES
            )
            had[client] = round
        state = downlinks.received(state, asked)
    assert 1 < 32 * ENTRIES / size < 30


def test_the_model_is_sent_where_it_is_smaller_than_the_broadcasts_together():
    # Each broadcast after the first one has 12 of 40 entries, with their positions: more than a third of the model.
    models = list(np.random.default_rng(5).standard_normal((5, ENTRIES)).astype(np.float32))
    setup = quadratic.setup(fedavg(), downlink=TopK(keep_ratio=12 / ENTRIES))
    *_, (_, message, state) = send(setup, models)
    size, whole = message_bits(message), 32 * ENTRIES
    assert 2 * size < whole < 3 * size
    # Clients that had the last broadcast, the one before it, and so on.
    had = torch.stack(
        [state["sent"] - after * torch.tensor([size, message["model"].num_values]) for after in (1, 2, 3, 4)]
    )
    owed = downlinks.missed({**state, "had": had}, message, range(4))
    # Together with the message itself: two messages are smaller than the model, and three are not.
    assert [size + owed[client].bits for client in range(4)] == [size, 2 * size, whole, whole]
    values = [message["model"].num_values + owed[client].values for client in range(4)]
    assert values == [12, 24, ENTRIES, ENTRIES]


def test_a_run_bills_each_client_what_it_missed():
    setup = quadratic.setup(
        fedavg(),
        rounds=8,
        clients={"per_round": 2, "dropout_before_download": 0.3},
        downlink=Dense(dtype="fp16"),
    )
    entries, had = sum(tensor.numel() for tensor in setup.initial.values()), dict[int, int]()
    for number, record in enumerate(play(setup)[0]):
        for row in record.clients:
            if row.status != "dropped_before_download":
                first = row.client not in had or number == 0
                late = not first and number - had[row.client] > 1
                # Two broadcasts of 16 bits an entry are as large as the model.
                assert row.downlink_bits == (32 if first or late else 16) * entries
                had[row.client] = number
            else:
                assert row.downlink_bits == 0
    assert len(had) > 2


def test_who_is_cut_off_while_it_downloads_lacks_all_of_it():
    """Of the 320 bits of the model, client 0 gets 48 in 5 seconds; the difference would be 160."""
    clients = {"downlink_mbps": [0.00001, 10.0, 10.0, 10.0], "deadline_s": 5.0}
    records, states = play(quadratic.setup(fedavg(), clients=clients, downlink=Dense(dtype="fp16")))
    assert {(one.clients[0].status, one.clients[0].downlink_bits) for one in records} == {("late", 48)}
    assert states[-1].downlink["had"][:, 0].tolist() == [-1, *[int(states[-1].downlink["sent"][0])] * 3]


def test_a_poll_downloads_once():
    (case,) = (case for case in FREE_DOWNLINKS if case.name == "fedavg")
    selection = {"name": "power-of-choice", "candidate_count": 4}
    options = {"rounds": 5, "clients": {"per_round": 2}, "downlink": {"name": "dense", "dtype": "fp16"}}
    plain, polled = (case.make(**options, **extra) for extra in ({}, {"selection": selection}))
    entries = sum(tensor.numel() for tensor in plain.initial.values())
    for setup, downloads in ((plain, 2), (polled, 4)):
        bills = [[row.downlink_bits // entries for row in record.clients] for record in play(setup)[0]]
        assert bills[0] == [32] * downloads
        assert all({*bill} <= {16, 32} for bill in bills) and {len(bill) for bill in bills} == {downloads}


@cases([case for case in FREE_DOWNLINKS if case.name in ("fedavg", "scaffold", "fedopt")])
def test_workers_and_checkpoints_change_no_bit(case: Case, tmp_path):
    def made(**options):
        return case.make(**{"downlink": ErrorFeedback(inner=TopK(keep_ratio=0.2)), **options})

    contracts.several_workers_give_the_bits_of_one(made())
    contracts.a_run_goes_on_from_its_checkpoint(made, case.num_clients, tmp_path)


def test_one_memory_does_not_serve_messages_to_single_clients():
    with refused(names=["downlink", "feedback", "L2GD"]):
        quadratic.setup(L2GD(quadratic.Quadratic()), downlink=ErrorFeedback())
