"""Calls of a round's training: how many there are, what each is given, and how many sums each holds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rayfl.determinism.seeding import NOBODY
from rayfl.gather import Aggregate, WeightedMean
from rayfl.population.client import ClientStatus
from rayfl.rounds import downlinks
from rayfl.rounds.executor import InlineExecutor, Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.partial_sums import Added
from rayfl.rounds.participants import cut_into_calls
from rayfl.rounds.rounds import first_run_state
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker
from rayfl.rounds.worker_jobs import RoundInputs, TrainJob
from rayfl.testing.executors import assert_same_bits, contents, play
from tests.methods.reference import setup_of


class Many(InlineExecutor):
    """So many workers, in this process; keeps what it was asked to train."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        super().__init__(setup)
        self.num_workers = num_workers
        self.jobs: list[TrainJob] = []

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        self.jobs += [job.work for job in jobs if isinstance(job.work, TrainJob)]
        return super().run(shared, jobs)


class Live(WeightedMean):
    """A mean that counts the sums that are alive."""

    alive: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def empty(self) -> Aggregate:
        Live.alive += 1
        Live.most = max(Live.most, Live.alive)
        return super().empty()

    def merge(self, a: Aggregate, b: Aggregate) -> Aggregate:
        Live.alive -= 1
        return super().merge(a, b)


def clients(count: int, **given: Any) -> Setup:
    return replace(setup_of("fedavg", {"batch_size": 4}, sizes=(4,) * count, rounds=1), **given)


def test_a_thousand_participants_give_32_workers_something_to_do():
    here = clients(1000)
    few, many = Many(here, 1), Many(here, 32)
    (_, (alone,)), (_, (shared,)) = play(here, few), play(here, many)
    assert len(few.jobs) == 1 and len(many.jobs) == 64
    assert max(len(job.clients) for job in many.jobs) == 16
    assert_same_bits(contents(few, alone), contents(many, shared))


def begun(setup: Setup, workers: int) -> CurrentRound:
    """The first round, before anybody trains."""
    inputs, ledger = RoundInputs(0, setup.plan(0)), Ledger(setup.population.sample_round(0))
    return CurrentRound(setup, Many(setup, workers), first_run_state(setup), inputs, ledger)


@pytest.mark.parametrize(
    ("workers", "calls", "longest"),
    # 48 even runs; 512 nodes of one or two clients, where 800 runs would be no shorter.
    [(48, 48, 21), (64, 64, 16), (800, 512, 2)],
)
def test_many_workers_get_at_most_one_call(workers: int, calls: int, longest: int):
    round = begun(clients(1000), workers)
    runs = cut_into_calls(round, dict.fromkeys(range(1000), ClientStatus.DELIVERED))
    assert (len(runs), max(last - first for first, last in runs)) == (calls, longest)


def test_a_round_can_use_a_worker_a_participant():
    here = clients(5)
    executor = Many(here, 9)
    play(here, executor)
    assert [job.clients for job in executor.jobs] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("sizes", "hyper", "given", "expected"),
    [
        ((8,) * 8, {}, {}, [4, 4]),
        # One client has as much to do as all others, in epochs and not in steps.
        ((8,) * 7 + (56,), {}, {}, [2, 2, 2, 2]),
        ((8,) * 7 + (56,), {"steps": 3}, {}, [4, 4]),
        ((2,) * 4 + (8,) * 4, {"steps": 3}, {}, [2, 2, 2, 2]),
        # A call that is a tenth longer.
        ((9, 9, 10, 10), {"batch_size": 0}, {}, [1, 1, 1, 1]),
        ((8,) * 8, {}, {"work": "capacity", "examples_per_s": [*[1.0] * 4, *[0.5] * 4]}, [2, 2, 2, 2]),
        ((8,) * 7, {}, {}, [2, 2, 2, 1]),
    ],
)
def test_two_workers_get_two_calls_where_these_are_equally_long(
    sizes: tuple[int, ...], hyper: dict[str, Any], given: dict[str, Any], expected: list[int]
):
    here = setup_of("fedavg", {"batch_size": 4, **hyper}, sizes=sizes, rounds=1, clients=given)
    executor = Many(here, 2)
    play(here, executor)
    assert [len(job.clients) for job in executor.jobs] == expected


def test_who_does_not_train_lengthens_no_call():
    here = clients(8)
    idle = dict.fromkeys(range(4), ClientStatus.DROPPED_AFTER_TRAINING) | dict.fromkeys(
        range(4, 8), ClientStatus.DELIVERED
    )
    round = begun(here, 2)
    assert cut_into_calls(round, idle) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert cut_into_calls(round, dict.fromkeys(range(8), ClientStatus.DELIVERED)) == [(0, 4), (4, 8)]


def test_stacks_come_whole():
    here = clients(11, engine_name="vmap", stack_width=3)
    executor = Many(here, 3)
    play(here, executor)
    assert [len(job.clients) for job in executor.jobs] == [3, 3, 3, 2]


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33, 50])
def test_a_call_holds_few_sums(count: int):
    here = clients(count)
    plan = here.plan(0)
    message = downlinks.broadcast(here, {"params": here.initial}, {}, here.context(0, plan, NOBODY, "server"))[0]
    name = next(iter(here.method.gather))
    here.method.gather = {name: Live()}
    Live.alive = Live.most = 0
    job = TrainJob(((0, count),), dict.fromkeys(range(count), ClientStatus.DELIVERED))
    _, outputs = Worker(here).do(job, RoundInputs(0, plan, message), ())
    (sent,) = outputs
    assert isinstance(sent, Added) and sent.sums[name].count == count
    assert Live.alive == 1
    assert Live.most <= math.ceil(math.log2(count)) + 1
