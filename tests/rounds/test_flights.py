"""Flights: their models are evaluated when they end, and only in updates that evaluate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfl.data.batches import Batch
from rayfl.experiment.prepare import prepare
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.schedules.asynchronous import Asynchronous, Buffered
from rayfl.schedules.base import Schedule
from rayfl.schedules.synchronous import SemiSynchronous, Synchronous
from rayfl.testing.executors import Shuffled, play, rows
from rayfl.tree import Tree
from tests.contracts.every_method import experiment
from tests.contracts.seams import quadratic

SPEEDS: dict[str, Any] = {"examples_per_s": {"median": 20.0, "sigma": 1.2}, "uplink_mbps": 0.002, "per_round": 3}
SCHEDULES = [Synchronous(), Buffered(buffer=2), Asynchronous(mixing=0.4), SemiSynchronous(period_s=0.7)]


class Measured(quadratic.Quadratic):
    """Counts the models that are evaluated: none has more examples than a batch."""

    evaluated_models = 0

    def losses(self, params: Tree, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        Measured.evaluated_models += 1
        return super().losses(params, batch)


def on_quadratics(schedule: Schedule, every: int) -> Setup:
    method = FedAvg(Measured(), FedAvg.Hyper(lr=0.05, batch_size=2))
    evaluation = Evaluation(every=every, pooled=False)
    setup = quadratic.setup(method, rounds=6, clients=SPEEDS, evaluation=evaluation)
    return replace(setup, schedule=schedule)


def in_flights(method: str, every: int, **clients: Any) -> Setup:
    chosen = experiment(
        method,
        schedule={"name": "buffered", "buffer": 2},
        clients={"count": 6, **SPEEDS, **clients},
        rounds=6,
        evaluation={"every": every},
    )
    return prepare(chosen)


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_only_what_is_recorded_is_evaluated(schedule: Schedule, every: int):
    setup = on_quadratics(schedule, every)
    Measured.evaluated_models = 0
    records, run_states = play(setup)
    evaluated = [record for record in records if setup.evaluated(record.row.round)]
    assert len(evaluated) == {0: 1, 1: 6, 3: 2}[every]
    # If every update evaluates, nobody waits: a flight that the run's end cuts off has been evaluated too.
    cut_off = [flight for flight in run_states[-1].air.flights.values() if flight.result and every == 1]
    # The server's model once, on the pooled test set, and the model of each client that came back.
    assert Measured.evaluated_models == sum(1 + record.row.delivered for record in evaluated) + len(cut_off)


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: schedule.name)
def test_a_model_that_waited_has_the_values_of_one_that_did_not(schedule: Schedule):
    (all_records, _), (some, _) = play(on_quadratics(schedule, 1)), play(on_quadratics(schedule, 3))
    for record in (2, 5):
        assert rows(some)[record] == rows(all_records)[record]
    assert any(metric.name == "own_after_training/loss" for metric in some[2].metrics)
    assert not any("_after_training" in metric.name for metric in some[3].metrics)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedavg_ft"])
def test_newcomers_and_personal_models_too(method: str):
    clients = {"unseen": 0.34, "upload_loss": 0.2}
    (all_records, _), (some, _) = play(in_flights(method, 1, **clients)), play(in_flights(method, 3, **clients))
    for record in (2, 5):
        assert rows(some)[record] == rows(all_records)[record]
    assert any(metric.name.startswith("unseen") for metric in some[2].metrics)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_resumed_run_evaluates_the_flights_that_were_under_way(method: str, tmp_path: Path):
    setup = in_flights(method, 2)
    records, run_states = play(setup)
    executor = InlineExecutor(setup)
    for number, run_state in enumerate(run_states[:-1]):
        kept = [flight.outputs.model for flight in run_state.air.flights.values() if flight.outputs]
        assert all(model is not None for model in kept)
        checkpoint.save(tmp_path, run_state, executor)
        rest, _ = play(setup, run_state=checkpoint.load(tmp_path, executor))
        assert rows(rest) == rows(records[number + 1 :])
    assert rows(play(setup, Shuffled(setup))[0]) == rows(records)


@pytest.mark.parametrize("schedule", ["buffered", "semi-synchronous"])
def test_flights_of_clients_that_are_not_evaluated_leave_no_model(schedule: str):
    chosen = experiment(
        "fedavg",
        schedule={"name": schedule} | ({"buffer": 2} if schedule == "buffered" else {}),
        clients={"count": 6, **SPEEDS},
        rounds=6,
        evaluation={"every": 2, "clients": 2},
    )
    setup = prepare(chosen)
    records, _ = play(setup)
    named = {metric.client for record in records for metric in record.metrics if "_after_training/" in metric.name}
    assert named <= {None, *setup.evaluated_clients}
    assert rows(play(setup, Shuffled(setup))[0]) == rows(records)


def test_full_batches_in_stacks_do_not_depend_on_who_is_still_under_way(tmp_path: Path):
    chosen = experiment(
        "fedpse",
        method={"name": "fedpse", "batch_size": 0},
        schedule={"name": "buffered", "buffer": 3},
        partition={"name": "dirichlet-sizes"},
        model={"name": "mlp"},
        clients={"count": 5, "per_round": 4},
        rounds=8,
        seed=417,
        runtime={"executor": "inline", "engine": "vmap"},
    )
    setup = prepare(chosen)
    records, run_states = play(setup)
    executor = InlineExecutor(setup)
    for number, run_state in enumerate(run_states[:-1]):
        checkpoint.save(tmp_path, run_state, executor)
        rest, _ = play(setup, run_state=checkpoint.load(tmp_path, executor))
        assert rows(rest) == rows(records[number + 1 :])
