"""What every method must hold: the same numbers however it runs, and again after a stop."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfl.methods.shared.wrapper import Wrapping
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.run_directory import checkpoint
from tests.contracts.every_method import (
    REGISTERED,
    SERVER_CASES,
    Case,
    assert_close,
    assert_same_bits,
    cases,
    contents,
    every_method,
    played,
)
from tests.contracts.executors import Shuffled, play


def rows(records: list[RoundRecord]) -> list[tuple]:
    """Everything recorded but the wall clock."""
    return [(record.row._replace(wall_s=0.0), record.clients, record.metrics) for record in records]


def test_the_registry_is_found():
    assert {"local", "fedavg", "fedpse"} <= {case.name for case in REGISTERED}


@cases(REGISTERED)
def test_a_method_names_its_paper(case: Case):
    assert case.kind.paper


@cases(REGISTERED)
def test_every_hyper_parameter_is_described(case: Case):
    undescribed = [name for name, field in case.kind.Hyper.model_fields.items() if not field.description]
    assert undescribed == []


@every_method
def test_loop_and_vmap_agree(case: Case):
    loop, vmap = (case.make(engine=engine, chunk_size=case.num_clients) for engine in ("loop", "vmap"))
    (looped, run_states), (stacked, stacked_worlds) = play(loop), play(vmap)
    assert_close(
        contents(InlineExecutor(loop), run_states[-1]),
        contents(InlineExecutor(vmap), stacked_worlds[-1]),
        tolerance=1e-5,
    )
    assert [(r.row.uplink_bits, r.row.downlink_bits) for r in looped] == [
        (r.row.uplink_bits, r.row.downlink_bits) for r in stacked
    ]
    for one, other in zip(looped, stacked, strict=True):
        assert [(m.client, m.name) for m in one.metrics] == [(m.client, m.name) for m in other.metrics]
        # A test example on the border between two classes may change sides.
        numbers = [np.array([m.value for m in r.metrics if "accuracy" not in m.name]) for r in (one, other)]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-4, atol=1e-5)


@every_method
@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_three_workers_in_any_order_give_the_bits_of_one(case: Case, chunk_size: int | None):
    # Everything comes to the workers of Shuffled as bytes: states, links and messages survive that.
    here = case.make(chunk_size=chunk_size)
    one, many = InlineExecutor(here), Shuffled(here)
    records, run_states = played(case)[1:] if chunk_size is None else play(here, one)
    others, other_worlds = play(here, many)
    assert rows(records) == rows(others)
    assert_same_bits(contents(one, run_states[-1]), contents(many, other_worlds[-1]))


@pytest.mark.ray
@every_method
@pytest.mark.parametrize("actors", ["one_actor", "three_actors"])
def test_ray_actors_give_the_bits_of_this_process(case: Case, actors: str, request: pytest.FixtureRequest):
    here, records, run_states = played(case)
    one, many = InlineExecutor(here), request.getfixturevalue(actors).take(here)
    assert many.num_workers == {"one_actor": 1, "three_actors": 3}[actors]
    others, other_worlds = play(here, many)
    assert rows(records) == rows(others)
    assert_same_bits(contents(one, run_states[-1]), contents(many, other_worlds[-1]))


@every_method
def test_twice_the_same(case: Case):
    (first, records, run_states), second = played(case), case.make()
    others, other_worlds = play(second)
    assert rows(records) == rows(others)
    assert_same_bits(
        contents(InlineExecutor(first), run_states[-1]), contents(InlineExecutor(second), other_worlds[-1])
    )


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
    clients = {"per_round": case.num_clients - 1, "dropout_after_training": 0.2}
    here = case.make(rounds=4, clients=clients)
    records, run_states = play(here)
    executor = InlineExecutor(here)
    checkpoint.save(tmp_path, run_states[1], executor)
    read_back = checkpoint.load(tmp_path, executor)
    assert read_back is not None and read_back.round == 2
    assert_same_bits(contents(executor, run_states[1]), contents(executor, read_back))
    later, later_worlds = play(case.make(rounds=4, clients=clients), run_state=read_back)
    assert rows(records[2:]) == rows(later)
    assert_same_bits(contents(executor, run_states[-1]), contents(executor, later_worlds[-1]))
