"""One client in one call: its download, its status, its message, and what is kept of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfl.determinism.seeding import NOBODY
from rayfl.methods.base import Work
from rayfl.population.client import ClientStatus
from rayfl.rounds import downlinks
from rayfl.rounds.client_round import CallInputs, ClientRound, with_memory, without_memory
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import Missed, RoundInputs
from rayfl.schedules.asynchronous import Buffered
from tests.methods.reference import setup_of

WORK = {"train": Work(1, 4)}


def clients(method: str = "fedavg", **given: Any) -> Setup:
    return setup_of(method, {"batch_size": 4}, sizes=(4, 4, 4), rounds=4, clients=given)


def begun(
    setup: Setup, status: ClientStatus = ClientStatus.DELIVERED, number: int | None = None, **inputs: Any
) -> ClientRound:
    """Client 1 after its download in round 2."""
    plan = setup.plan(2)
    server = setup.server_half.init_server(setup.initial)
    message, _ = downlinks.broadcast(setup, server, {}, setup.context(2, plan, NOBODY, "server"))
    call = CallInputs(RoundInputs(2, plan, message, **inputs), message, None)
    return ClientRound(setup, call, 1, status, setup.first_state(1), {}, number)


def test_a_download_is_the_broadcast_and_what_was_missed():
    entries = sum(tensor.numel() for tensor in clients().initial.values())
    assert (begun(clients()).downlink_bits, begun(clients()).num_received) == (32 * entries, entries)
    late = begun(clients(), missed={1: Missed(640, 20)})
    assert (late.downlink_bits, late.num_received) == (32 * entries + 640, entries + 20)


@pytest.mark.parametrize(
    ("status", "steps"),
    [(ClientStatus.DROPPED_AFTER_DOWNLOAD, 0), (ClientStatus.DROPPED_AFTER_TRAINING, 1), (ClientStatus.LATE, 1)],
)
def test_work_that_is_lost_is_billed_and_not_done(status: ClientStatus, steps: int):
    ended = begun(clients(), status).untrained()
    assert ended is not None
    assert (ended.result.status, ended.result.num_steps, ended.result.billed_bits) == (status, steps, 0)
    assert ended.outputs.state is ended.outputs.message is ended.evaluated is None


@pytest.mark.parametrize("status", [ClientStatus.DELIVERED, ClientStatus.UPLOAD_LOST, ClientStatus.NOT_SELECTED])
def test_who_trains_has_a_message_only_if_it_uploads(status: ClientStatus):
    setup = clients()
    client_round = begun(setup, status)
    assert client_round.untrained() is None
    ended = client_round.finish(client_round.begin(), WORK)
    entries = sum(tensor.numel() for tensor in setup.initial.values())
    # The number of its examples is the weight of its message: 64 bits.
    assert (ended.result.status, ended.result.billed_bits) == (status, 32 * entries + 64 if status.uploads else 0)
    assert (ended.result.metrics != {}) is status.keeps_state


@pytest.mark.parametrize(
    ("schedule", "number", "evaluated", "kept", "measured"),
    [
        (None, None, True, False, True),
        (None, None, False, False, False),
        (Buffered(), 5, True, True, False),
        (Buffered(), 5, False, True, False),
        # A newcomer under a schedule of flights is in none.
        (Buffered(), None, True, False, True),
    ],
)
def test_a_trained_model_is_evaluated_now_or_kept(
    schedule: Any, number: int | None, evaluated: bool, kept: bool, measured: bool
):
    setup = replace(clients(), evaluation=Evaluation(every=2))
    setup = replace(setup, schedule=schedule) if schedule else setup
    client_round = begun(setup, number=number, evaluated=evaluated)
    ended = client_round.finish(client_round.begin(), WORK)
    assert (ended.outputs.model is not None, ended.evaluated is not None) == (kept, measured)
    assert ended.evaluated is None or {"own_after_training/loss"} <= ended.evaluated.metrics.keys()
    # A model that is kept is not evaluated yet, so that its metrics are none of the training's.
    assert not any("_after_training" in name for name in ended.result.metrics)


def test_a_flight_draws_by_its_number():
    client_round = begun(clients(), number=41)
    assert client_round.ctx.draws.key == (client_round.setup.seed, 41, 1, "client")
    assert (client_round.local_task().round, client_round.ctx.round) == (41, 2)


def test_a_stored_state_is_the_methods_and_the_compressors_memory():
    state, memory = {"count": torch.ones(1)}, {"delta": {"w": torch.zeros(2)}}
    assert without_memory(with_memory(state, memory)) == (state, memory)
    assert with_memory(state, {}) == state and without_memory(state) == (state, {})
