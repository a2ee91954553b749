"""A wrapper passes everything on, whatever hooks methods get later."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from rayfl.compress.dense import Dense
from rayfl.determinism.seeding import LazyGenerator
from rayfl.methods.base import Context, Method, Plan, ServerHalf, Stage, Work
from rayfl.methods.fedavg import FedAvg
from rayfl.methods.local import Local
from rayfl.methods.shared.wrapper import Wrapping, WrappingClients
from tests.contracts.seams.quadratic import Quadratic
from tests.refusals import refused


def test_every_hook_is_passed_on():
    hooks = {
        name
        for kind in (Method, ServerHalf)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert hooks - {*vars(Wrapping), *vars(WrappingClients)} == set()


def test_only_server_methods_are_wrapped():
    with refused(names=["Wrapping", "server", "Local"]):
        Wrapping(Local(Quadratic()))


class Measuring(Wrapping):
    own_stages: ClassVar[tuple[str, ...]] = ("measure",)
    splits: Mapping[str, float] = {"heldout": 0.2}


def test_the_inner_method_sees_its_own_stages_and_work_alone():
    wrapper = Measuring(FedAvg(Quadratic()))
    inner, own = Stage("train", epochs=1), Stage("measure", epochs=1)
    ctx = Context(
        round=0,
        plan=Plan((own, inner), up=False),
        client=None,
        num_clients=2,
        num_rounds=3,
        initial={},
        uplink=Dense(),
        downlink=Dense(),
        draws=LazyGenerator(0),
        coin=lambda round: 0.5,
        work={"measure": Work(1, 4), "train": Work(2, 8)},
    )
    assert wrapper.inside(ctx) == replace(ctx, plan=Plan((inner,), up=False), work={"train": Work(2, 8)})


def test_splits_of_both_are_needed():
    class Choosing(FedAvg):
        splits: Mapping[str, float] = {"validation": 0.1}

    assert Measuring(Choosing(Quadratic())).splits == {"validation": 0.1, "heldout": 0.2}


def test_another_form_of_the_task_reaches_the_inner_method():
    wrapper = Wrapping(FedAvg(Quadratic()))
    twin = wrapper.with_task(Quadratic().functional())
    assert (twin.task.uses_functorch, twin.inner.task.uses_functorch) == (True, True)
    assert not wrapper.inner.task.uses_functorch
