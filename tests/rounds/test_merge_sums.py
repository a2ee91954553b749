"""Partial sums merged along the tree by calls: the same bits, one sum for the round loop, and the rule for who adds."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rayfl.rounds import aggregation, run_state
from rayfl.rounds.executor import InlineExecutor, Job, JobResult, Ref
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import MergeJob
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from tests.methods.reference import setup_of
from tests.rounds.test_train import Many


class Counting(Many):
    """Keeps the merges that it was asked for, by wave, and what the round loop fetched."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        super().__init__(setup, num_workers)
        self.waves: list[list[MergeJob]] = []
        self.fetched: list[Any] = []

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        if isinstance(jobs[0].work, MergeJob):
            self.waves.append([job.work for job in jobs])
        return super().run(shared, jobs)

    def get(self, ref: Ref) -> Any:
        self.fetched.append(ref)
        return super().get(ref)


def clients(count: int, method: str = "fedavg", **given: Any) -> Setup:
    return replace(setup_of(method, {"batch_size": 4}, sizes=(4,) * count, rounds=2), **given)


@pytest.fixture
def merged_by_calls(monkeypatch: pytest.MonkeyPatch):
    """However small the sums are."""
    monkeypatch.setattr(aggregation, "FEW_BYTES", 0)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedpse"])
@pytest.mark.parametrize("count", [5, 16, 37])
@pytest.mark.usefixtures("merged_by_calls")
def test_calls_give_the_bits_of_the_round_loop(method: str, count: int):
    here = clients(count, method)
    alone, many, shuffled = InlineExecutor(here), Counting(here, 7), Shuffled(here)
    records, run_states = play(here, alone)
    for executor in (many, shuffled):
        others, other_states = play(here, executor)
        assert rows(records) == rows(others)
        assert_same_bits(contents(alone, run_states[-1]), contents(executor, other_states[-1]))
    assert many.waves


@pytest.mark.usefixtures("merged_by_calls")
def test_one_sum_a_round_reaches_the_round_loop():
    # 8 workers take two calls each: 16 sums, halved by every wave.
    executor = Counting(clients(64), 8)
    play(executor.worker.setup, executor)
    assert [len(wave) for wave in executor.waves] == [8, 4, 2, 1] * 2
    assert executor.waves[3] == [MergeJob((0, 64), ((0, 32), (32, 64)))]
    assert len(executor.fetched) == 2


@pytest.mark.usefixtures("merged_by_calls")
def test_many_workers_make_a_merge_for_eight_sums(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_state, "MANY_WORKERS", 15)
    here = clients(64)
    alone, many = InlineExecutor(here), Counting(here, 16)
    (_, run_states), (_, others) = play(here, alone), play(here, many)
    assert_same_bits(contents(alone, run_states[-1]), contents(many, others[-1]))
    # 16 calls; then two of eight sums each, and their results.
    assert len(many.jobs) == 2 * 16 and [len(wave) for wave in many.waves] == [2, 1] * 2


@pytest.mark.usefixtures("merged_by_calls")
def test_merges_of_stacks_that_are_no_nodes():
    here = clients(11, engine_name="vmap", stack_width=3)
    alone, many = InlineExecutor(here), Counting(here, 3)
    (_, run_states), (_, others) = play(here, alone), play(here, many)
    assert_same_bits(contents(alone, run_states[-1]), contents(many, others[-1]))
    assert many.waves


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("merged_by_calls")
def test_one_or_two_workers_merge_nothing(workers: int):
    executor = Counting(clients(9), workers)
    play(executor.worker.setup, executor)
    assert executor.waves == []


def test_few_bytes_are_added_by_the_round_loop():
    executor = Counting(clients(9), 4)
    play(executor.worker.setup, executor)
    assert executor.waves == []
    # 9 calls, for 8 are not enough to give each of them at most two of nine clients.
    assert len(executor.fetched) == 2 * 9


@pytest.mark.usefixtures("merged_by_calls")
def test_collected_messages_travel_once():
    executor = Counting(clients(9, "fedmgda"), 4)
    play(executor.worker.setup, executor)
    assert executor.waves == []


@pytest.mark.usefixtures("merged_by_calls")
def test_take_first_is_merged_too():
    here = clients(12)
    population = here.population
    some = replace(
        here,
        population=type(population)(
            population.settings.model_copy(update={"take_first": 9}), here.seed, here.partition.train.sizes
        ),
    )
    alone, many = InlineExecutor(some), Counting(some, 5)
    (records, run_states), (others, other_states) = play(some, alone), play(some, many)
    assert rows(records) == rows(others)
    assert_same_bits(contents(alone, run_states[-1]), contents(many, other_states[-1]))
    assert many.waves


def test_a_merge_job_pickles():
    job = MergeJob((0, 4), ((0, 2), (2, 4)))
    assert pickle.loads(pickle.dumps(job)) == job  # noqa: S301 - our own bytes
