"""Stages of single clients: what a method gives them, and who counts it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rayfl import Experiment
from rayfl.data.batches import Batch
from rayfl.errors import MethodError
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import (
    Capabilities,
    Context,
    Finished,
    FirstDraws,
    Message,
    Plan,
    Stage,
    State,
    Traits,
    Tree,
    Work,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.rounds.engines import LocalTask
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import cut_off_surplus
from rayfl.rounds.worker_jobs import ClientResult
from rayfl.testing import contracts
from rayfl.testing.executors import play
from tests.refusals import refused

COUNT = Stage("count", epochs=1, batch_size=16)


class CountState(State):
    counts: torch.Tensor


class CountCarry(LocalCarry):
    counts: torch.Tensor


class Counting(FedAvg):
    """FedAvg whose clients know the counts of their labels, as FedRoD's do (Chen, Chao, ICLR 2022)."""

    count: ClassVar[Stage] = COUNT

    def plan(self, round_number: int, coin: float) -> Plan:
        plan = super().plan(round_number, coin)
        return replace(plan, stages=(self.count, *plan.stages))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 0.0 if stage.name == "count" else super().gradients_per_example(stage, ctx)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"counts": torch.zeros(10)}

    def begin(self, state: State, received: Message, ctx: Context) -> Any:
        return {**super().begin(state, received, ctx), "counts": state["counts"]}

    def step(self, carry: Any, batch: Batch, *, stage: Stage) -> Any:
        if stage.name != "count":
            return super().step(carry, batch, stage=stage)
        hot = (batch.labels[:, None] == torch.arange(10)).float().T
        return {**carry, "counts": carry["counts"] + batch.without_padding(hot).sum(dim=1)}

    def finish(self, state: State, carry: Any, ctx: Context) -> Finished:
        return replace(super().finish(state, carry, ctx), state={"counts": carry["counts"]})


class Once(Counting):
    """Counts in a client's first round."""

    capabilities = Capabilities(takes_stale=True)

    def stages(self, state: State, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        return tuple(stage for stage in plan.stages if stage.name != "count" or not state["counts"].any())


class FreeOnce(Once):
    """Counts in a client's first round, and computes nothing to do so."""

    count: ClassVar[Stage] = replace(COUNT, free=True)


class Free(Counting):
    """Counts in every round."""

    count: ClassVar[Stage] = replace(COUNT, free=True)


def here(method: type[FedAvg], *, engine: str = "loop", clients: dict[str, Any] | None = None, **options: Any) -> Setup:
    tables = {"count": 5, "per_round": 3, "examples_per_s": 100.0, **(clients or {})}
    partition = {"name": "dirichlet-client", "alpha": 0.5}
    given = {"rounds": 4, "data": "digits", "model": "logistic", "partition": partition, **options}
    return prepare(Experiment(method=method(batch_size=32), clients=tables, runtime={"engine": engine}, **given))


def counted(setup: Setup) -> list[tuple[int, int, int, float]]:
    """Client, examples, steps and seconds of each client's round."""
    return [
        (row.client, row.num_samples, row.num_steps, row.simulated_s)
        for record in play(setup)[0]
        for row in record.clients
        if row.num_samples
    ]


def held(setup: Setup) -> list[int]:
    return setup.partition.train.sizes.tolist()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_what_is_done_once_is_counted_once(engine: str):
    setup, seen = here(Once, engine=engine), set[int]()
    for client, examples, steps, seconds in counted(setup):
        size, is_first = held(setup)[client], client not in seen
        assert examples == size * (1 + is_first)
        assert steps == -(-size // 32) + is_first * -(-size // 16)
        # Counting takes a third of a gradient an example.
        assert seconds == pytest.approx(size * (1 + is_first / 3) / 100, rel=1e-3)
        seen.add(client)
    assert len(seen) == 5


@pytest.mark.parametrize("method", [Free, FreeOnce])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_free_stage_is_done_and_not_counted(engine: str, method: type[Counting]):
    setup = here(method, engine=engine)
    for client, examples, steps, seconds in counted(setup):
        size = held(setup)[client]
        assert (examples, steps) == (size, -(-size // 32))
        assert seconds == pytest.approx(size / 100, rel=1e-3)
    plain = counted(here(FedAvg, engine=engine))
    assert counted(setup) == plain


@pytest.mark.parametrize("method", [Once, FreeOnce])
@pytest.mark.parametrize("work", [{}, {"work": "capacity", "examples_per_s": {"median": 50.0, "sigma": 1.0}}], ids=str)
def test_every_client_has_the_counts_of_its_labels(method: type[Counting], work: dict[str, Any]):
    setup = here(method, clients=work)
    _, run_states = play(setup)
    whole = method is FreeOnce or not work
    for client, state in run_states[-1].states.items():
        labels = setup.dataset.train.labels[setup.partition.train[client]]
        assert np.array_equal(state["counts"], np.bincount(labels, minlength=10)) or not whole
    # Slow clients count a part of their labels if counting costs what training does.
    assert whole or any(state["counts"].sum() < held(setup)[client] for client, state in run_states[-1].states.items())


def test_the_contracts_hold(tmp_path: Path):
    def make(**options: Any) -> Setup:
        return here(FreeOnce, **options)

    contracts.loop_and_vmap_agree(make(), make(engine="vmap"))
    contracts.several_workers_give_the_bits_of_one(make(engine="vmap"))
    contracts.a_run_goes_on_from_its_checkpoint(make, 5, tmp_path)


def test_hooks_see_the_clients_own_stages():
    seen = dict[str, set[tuple[str, ...]]]()

    class Seeing(Once):
        def note(self, hook: str, ctx: Context) -> None:
            seen.setdefault(hook, set()).add(tuple(stage.name for stage in ctx.plan.stages))

        def begin(self, state: State, received: Message, ctx: Context) -> Any:
            self.note("begin", ctx)
            return super().begin(state, received, ctx)

        def finish(self, state: State, carry: Any, ctx: Context) -> Finished:
            self.note("finish", ctx)
            assert ctx.work.keys() == {stage.name for stage in ctx.plan.stages}
            return super().finish(state, carry, ctx)

        def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
            self.note("gradients", ctx)
            return super().gradients_per_example(stage, ctx)

    play(here(Seeing))
    assert seen == {hook: {("count", "train"), ("train",)} for hook in ("begin", "finish", "gradients")}


@pytest.mark.parametrize("wrap", ["elastic", {"name": "clip"}], ids=str)
def test_a_wrapper_keeps_its_own_stages_and_passes_on_those_of_the_client(wrap: Any):
    options = {"wrap": [wrap], "splits": {"heldout_ratio": 0.2}}
    setup, seen = here(Once, **options), set[int]()
    measured = setup.partition.heldout.sizes if wrap == "elastic" else np.zeros(5, int)
    for client, examples, *_ in counted(setup):
        assert examples == held(setup)[client] * (1 + (client not in seen)) + measured[client]
        seen.add(client)
    assert setup.method.has_own_stages and not here(FedAvg, **options).method.has_own_stages
    plan, state = setup.plan(0), setup.first_state(0)
    ctx = setup.context(0, plan, 0, "client")
    counts = {**state, "counts": torch.ones(10)}
    own = ["sensitivity"] if wrap == "elastic" else []
    assert [stage.name for stage in setup.method.stages(state, plan, ctx)] == [*own, "count", "train"]
    assert [stage.name for stage in setup.method.stages(counts, plan, ctx)] == [*own, "train"]


def test_clients_that_come_too_late_are_billed_for_their_own_stages():
    setup = here(Once, clients={"per_round": 5, "examples_per_s": 10.0, "deadline_s": 2.03})
    (record, *_), _ = play(setup)
    # Twenty gradients, as the download takes some milliseconds: 60 examples are counted at a third each, or all of a
    # client's, and then what is left is trained.
    for row in record.clients:
        size = held(setup)[row.client]
        counts = min(size, 60)
        trained = max(0, int(20.2 - counts / 3)) if counts == size else 0
        assert row.status == "late" and row.num_samples == counts + min(size, trained)


def test_a_surplus_client_is_billed_for_the_stages_that_it_had():
    setup = here(Counting, clients={"per_round": 2, "take_first": 1})
    train = setup.plan(1).stages[1]
    own = {0: (train,), 1: (COUNT, train)}
    results = [
        ClientResult(
            client,
            status=setup.population.drawn_statuses(0, [client])[client],
            stages=stages,
            work={
                one.name: LocalTask(client, 1, 1, dict, setup.data(client), stages, setup.device).planned(one)
                for one in stages
            },
        )
        for client, stages in own.items()
    ]
    cut = cut_off_surplus(setup, replace(setup.plan(1), stages=(train,)), results)
    (late,) = (one for one in cut.values() if one.cut_s is not None)
    assert late.work.keys() == {stage.name for stage in own[late.client]}


@pytest.mark.parametrize("schedule", [{"name": "asynchronous"}, {"name": "buffered", "buffer": 2}], ids=str)
def test_flights_last_as_long_as_the_clients_own_stages(schedule: dict[str, Any]):
    setup, seen = here(Once, schedule=schedule, rounds=20), set[int]()
    for record in play(setup)[0]:
        values = {(one.client, one.name): float(one.value or 0) for one in record.metrics}
        for row in record.clients:
            size = held(setup)[row.client]
            gradients = size if row.client in seen else size * 4 / 3
            lasted = values[row.client, "flight/ended_s"] - values[row.client, "flight/began_s"]
            assert lasted == pytest.approx(gradients / 100, rel=1e-2)
            seen.add(row.client)
    assert seen == set(range(5))


def test_stages_that_are_none_are_refused_with_the_name_of_the_hook():
    class Wrong(FedAvg):
        def stages(self, state: State, plan: Plan, ctx: Context) -> Any:
            return None

    class Twice(FedAvg):
        def stages(self, state: State, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
            return (*plan.stages, *plan.stages)

    class TwiceInPlan(FedAvg):
        def plan(self, round_number: int, coin: float) -> Plan:
            return Plan(super().plan(round_number, coin).stages * 2)

    with refused(names=["Wrong.stages", "nothing", "stages"], error=MethodError):
        play(here(Wrong))
    with refused(names=["Twice.stages", "'train'"], error=MethodError):
        play(here(Twice))
    with refused(names=["TwiceInPlan.plan", "'train'"], error=Exception):
        play(here(TwiceInPlan))


def test_a_subset_is_rounded_and_never_empty():
    stage = Stage(epochs=2, batch_size=4, subset=0.3)
    assert [stage.num_examples(held) for held in (1, 2, 5, 10)] == [1, 1, 2, 3]
    assert Stage().num_examples(7) == 7
    setup = here(FedAvg)
    task = LocalTask(0, 0, 1, dict, setup.data(0), (stage,), setup.device)
    size = stage.num_examples(held(setup)[0])
    assert task.planned(stage) == Work(2 * -(-size // 4), 2 * size)
    whole = replace(stage, batch_size=None)
    assert task.order(whole).sizes == [size, size]
