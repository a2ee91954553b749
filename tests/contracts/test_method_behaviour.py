"""What every method must hold of its arguments and its clients: it modifies nothing, and survives who is missing."""

import numpy as np
import pytest

from rayfl.methods.base import Context, Finished, FirstDraws, Message, Traits, Tree
from rayfl.methods.compressed.lag import LAG
from rayfl.methods.server.scaffold import Scaffold, ScaffoldCarry, ScaffoldState
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.run_state import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts
from rayfl.testing.executors import assert_same_bits, contents, leaves, play
from rayfl.testing.watching import watched
from tests.contracts.every_method import (
    CASES,
    PARTIAL_CASES,
    SERVER_CASES,
    Case,
    cases,
    every_method,
    played,
)
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused

NOBODY = 1 - 1e-12
"""A chance of dropping out that everyone meets."""


@every_method
def test_no_hook_modifies_what_it_was_given(case: Case):
    # No layer of these models is a convolution.
    contracts.no_hook_modifies_what_it_was_given(case.make(), played(case)[1:], unread=["first_conv"])


def test_the_watch_sees_a_modification():
    class Careless(LAG):
        def step(self, carry, batch, *, stage):
            # No counter of writes moves.
            carry["params"]["bias"].data.add_(1.0)
            return super().step(carry, batch, stage=stage)

    here, log = watched(setup(Careless(Quadratic()), rounds=1))
    play(here)
    assert set(log.modified) == {"step: carry"}


def test_the_watch_sees_keys_that_are_not_declared():
    class Misspelt(Scaffold):
        def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ScaffoldState:
            return {"control_variat": params}  # pyright: ignore[reportReturnType]

        def begin(self, state: ScaffoldState, received: Message, ctx: Context) -> ScaffoldCarry:
            return super().begin({"control_variate": ctx.initial}, received, ctx)

        def finish(self, state: ScaffoldState, carry: ScaffoldCarry, ctx: Context) -> Finished:
            return super().finish({"control_variate": ctx.initial}, carry, ctx)

    here, log = watched(setup(Misspelt(Quadratic()), rounds=1))
    play(here)
    assert set(log.undeclared) == {"init_client: return", "begin: state", "finish: state"}


@cases([case for case in PARTIAL_CASES if not case.kind.capabilities.in_pairs])
def test_a_client_that_drops_keeps_its_state_and_its_link(case: Case):
    clients = {"dropout_after_training": 0.3, "dropout_before_download": 0.2}
    here = case.make(seed=1, rounds=5, clients=clients, evaluation=Evaluation(every=0))
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    # Peers that are away from the exchange still train.
    gone = {"dropped_after_training"} | (set() if here.is_peer else {"dropped_before_download"})
    dropped = 0
    for before, after, record in zip(run_states, run_states[1:], records[1:], strict=False):
        for client in (row.client for row in record.clients if row.status in gone):
            dropped += 1
            for refs, new in ((before.states, after.states), (before.server_memories, after.server_memories)):
                assert (client in refs) == (client in new)
                if client in refs:
                    assert_same_bits(leaves("", executor.get(refs[client])), leaves("", executor.get(new[client])))
    assert dropped > 0


@cases([case for case in SERVER_CASES if case in PARTIAL_CASES])
@pytest.mark.parametrize("when", ["dropout_before_download", "dropout_after_training"])
def test_a_round_in_which_nothing_arrives(case: Case, when: str):
    here, log = watched(case.make(rounds=4, clients={when: NOBODY}))
    records, run_states = play(here, rounds=2)
    assert [record.row.delivered for record in records] == [0, 0]
    # Clients that drop out after the download have told their label counts before it.
    told = 32 * 10 * case.num_clients if case.kind.capabilities.label_counts and "after" in when else 0
    assert [record.row.uplink_bits for record in records] == [told, 0]
    assert log.calls["server_update"] == 2
    assert_finite(here, run_states[-1])
    # And with everybody back the run goes on.
    healthy = case.make(rounds=4)
    later, run_states = play(healthy, run_state=run_states[-1])
    assert [record.row.round for record in later] == [2, 3]
    assert later[0].row.delivered > 0
    assert_finite(healthy, run_states[-1])


@cases([case for case in CASES if case not in PARTIAL_CASES])
@pytest.mark.parametrize("setting", ["dropout_after_training", "dropout_before_download", "availability"])
def test_a_method_that_needs_everyone_refuses_absences(case: Case, setting: str):
    with refused(names=[case.kind.__name__, f"clients.{setting}"]):
        case.make(clients={setting: {"probability": 0.9} if setting == "availability" else 0.1})


@cases([case for case in PARTIAL_CASES if case not in SERVER_CASES])
def test_peers_survive_a_round_without_anybody(case: Case):
    here = case.make(rounds=2, clients={"dropout_before_download": NOBODY})
    records, run_states = play(here)
    assert [record.row.delivered for record in records] == [0, 0]
    assert_finite(here, run_states[-1])


def assert_finite(setup: Setup, run_state: RunState) -> None:
    assert all(np.isfinite(array).all() for array in contents(InlineExecutor(setup), run_state).values())


@cases([case for case in SERVER_CASES if case in PARTIAL_CASES])
def test_only_the_selected_take_part(case: Case):
    here = case.make(rounds=3, clients={"per_round": 2}, evaluation=Evaluation(every=0))
    plans = [here.plan(round) for round in range(3)]
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for round, record in enumerate(records):
        selected = here.population.sample_round(round).selected
        assert len(selected) == record.row.selected == 2
        assert {row.client for row in record.clients if row.uplink_bits} <= set(selected)
        if plans[round].trainers == "all":
            continue
        assert {row.client for row in record.clients if row.downlink_bits} <= set(selected)
        if round:
            before, after = run_states[round - 1].states, run_states[round].states
            for client in set(before) - set(selected):
                assert_same_bits(leaves("", executor.get(before[client])), leaves("", executor.get(after[client])))
