"""Setup: what is the same in all rounds, and what follows from it for each call."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from rayfl.compress.sparse import TopK
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.schedules.asynchronous import Buffered
from rayfl.testing.executors import assert_same_bits
from tests.methods.reference import setup_of


def clients(count: int = 6, method: str = "fedavg", **given: Any) -> Setup:
    return setup_of(method, {"batch_size": 4}, sizes=(4,) * count, rounds=5, clients=given)


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("fedavg", {}, 6),
        # All clients download and train, whoever is selected.
        ("pfedme", {}, 10),
        ("local", {}, 10),
        ("fedavg", {"engine_name": "vmap", "stack_width": 4}, 2),
    ],
)
def test_a_round_can_use_an_actor_for_each_client_that_trains(method: str, given: dict[str, Any], expected: int):
    sampled = {} if method == "local" else {"per_round": 6}
    assert replace(clients(10, method, **sampled), **given).most_actors == expected


@pytest.mark.parametrize(("every", "expected"), [(0, [4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (9, [4])])
def test_rounds_that_evaluate(every: int, expected: list[int]):
    setup = replace(clients(), evaluation=Evaluation(every=every))
    assert [round for round in range(5) if setup.evaluated(round)] == expected


def test_a_sample_of_clients_is_drawn_once_and_never_an_unseen_one():
    setup = replace(clients(10, unseen=0.4), evaluation=Evaluation(clients=3))
    assert (setup.num_clients, setup.unseen) == (6, range(6, 10))
    sample = [*setup.evaluated_clients]
    assert len(sample) == 3 and sample == sorted(sample) and max(sample) < 6
    assert [*replace(setup).evaluated_clients] == sample
    rows = [row for client in sample for row in setup.partition.train[client]]
    assert setup.evaluated_rows.tolist() == rows


@pytest.mark.parametrize(
    ("schedule", "every", "method", "messages", "models"),
    [
        (None, 1, "fedavg", False, False),
        (None, 2, "fedavg", False, False),
        (Buffered(), 1, "fedavg", True, False),
        (Buffered(), 2, "fedavg", True, True),
        (Buffered(), 0, "ditto", True, True),
        (None, 2, "dpsgd", True, False),
    ],
)
def test_what_waits_for_its_flight(schedule: Any, every: int, method: str, messages: bool, models: bool):
    setup = replace(clients(method=method), evaluation=Evaluation(every=every))
    setup = replace(setup, schedule=schedule) if schedule else setup
    assert (setup.keeps_messages, setup.keeps_models) == (messages, models)
    assert len(setup.output_slots) == setup.stateful + setup.has_server_memory + messages + models


def test_a_client_s_own_retention_ratio_is_that_of_its_uplink():
    setup = replace(clients(3, retention_ratio=[0.25, 0.5, 1.0]), uplink=TopK(keep_ratio=0.1))
    ratios = [setup.uplink_of(setup.population.traits(client)) for client in range(3)]
    assert [uplink.keep_ratio for uplink in ratios if isinstance(uplink, TopK)] == [0.25, 0.5, 1.0]
    assert replace(setup, population=clients(3).population).uplink_of(clients(3).population.traits(0)) == setup.uplink


def test_a_setup_that_has_travelled_makes_the_same_states():
    setup = clients(method="scaffold")
    assert setup.metrics and setup.initial and setup.evaluated_rows.size
    copy = pickle.loads(pickle.dumps(setup))  # noqa: S301 - our own bytes
    assert not {"initial", "metrics", "evaluated_rows"} & vars(copy).keys()
    assert_same_bits(*({name: leaf.numpy() for name, leaf in one.initial.items()} for one in (setup, copy)))
    assert copy.first_state(2).keys() == setup.first_state(2).keys()


@pytest.mark.parametrize("client", [0, 5])
def test_a_context_draws_by_the_round_or_by_the_number_of_the_flight(client: int):
    setup = clients()
    plan = setup.plan(3)
    assert setup.context(3, plan, client, "client").draws.key == (setup.seed, 3, client, "client")
    flown = setup.context(3, plan, client, "client", 17)
    assert (flown.round, flown.draws.key) == (3, (setup.seed, 17, client, "client"))
