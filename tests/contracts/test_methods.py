"""What every method must hold: the same numbers however it runs, and again after a stop."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl.methods.shared.wrapper import Wrapping
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing import contracts
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from tests.contracts.actors import SharedActors
from tests.contracts.every_method import (
    REGISTERED,
    SEAMS,
    SERVER_CASES,
    VARIED,
    Case,
    cases,
    every_method,
    played,
    with_two_unseen,
)
from tests.contracts.waiting import no_stage_waits_for_a_gpu


def test_the_registry_is_found():
    assert {"local", "fedavg", "fedpse"} <= {case.name for case in REGISTERED}


@cases(REGISTERED)
def test_a_method_names_its_paper_and_describes_its_settings(case: Case):
    assert case.kind.paper
    undescribed = [name for name, field in case.kind.Hyper.model_fields.items() if not field.description]
    assert undescribed == []


@every_method
def test_loop_and_vmap_agree(case: Case):
    loop, records, run_states = played(case)
    vmap = case.make(engine="vmap", stack_width=case.num_clients)
    contracts.loop_and_vmap_agree(loop, vmap, (records, run_states))


@every_method
def test_no_stage_waits_for_a_gpu(case: Case):
    no_stage_waits_for_a_gpu(case.make(engine="vmap", stack_width=case.num_clients, rounds=2))


@every_method
def test_three_workers_in_any_order_give_the_bits_of_one(case: Case):
    contracts.several_workers_give_the_bits_of_one(case.make(), played(case)[1:])


@cases([*SEAMS, *VARIED])
def test_three_workers_with_stacks_give_the_bits_of_one(case: Case):
    contracts.several_workers_give_the_bits_of_one(case.make(engine="vmap", stack_width=2))


@pytest.mark.ray
@every_method
def test_ray_actors_give_the_bits_of_this_process(case: Case, three_actors: SharedActors):
    here, records, run_states = played(case)
    one, many = InlineExecutor(here), three_actors.take(here)
    assert many.num_workers == 3
    others, other_worlds = play(here, many)
    assert rows(records) == rows(others)
    assert_same_bits(contents(one, run_states[-1]), contents(many, other_worlds[-1]))


@cases(SERVER_CASES)
def test_a_wrapper_that_changes_nothing_changes_nothing(case: Case):
    plain, records, run_states = played(case)
    wrapped = replace(plain, method=Wrapping(plain.method))
    others, other_worlds = play(wrapped)
    assert rows(records) == rows(others)
    assert_same_bits(
        contents(InlineExecutor(plain), run_states[-1]), contents(InlineExecutor(wrapped), other_worlds[-1])
    )
    for hook in ("personal_message", "reply"):
        assert wrapped.server_half.overrides(hook) == plain.server_half.overrides(hook)


@every_method
def test_another_seed_gives_another_result(case: Case):
    run_states = []
    for seed in (1, 2):
        here = case.make(seed=seed, rounds=1)
        run_states.append(contents(InlineExecutor(here), play(here)[1][-1]))
    first, second = run_states
    assert any(not np.array_equal(array, second.get(place)) for place, array in first.items())


@every_method
def test_a_run_goes_on_from_its_checkpoint(case: Case, tmp_path: Path):
    contracts.a_run_goes_on_from_its_checkpoint(case.make, case.num_clients, tmp_path)


@every_method
def test_unseen_clients_are_evaluated_and_leave_no_trace(case: Case):
    contracts.unseen_clients_are_evaluated_and_leave_no_trace(with_two_unseen(case))
