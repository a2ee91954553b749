"""A wrapper passes everything on, whatever hooks methods get later."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rayfl.compress.dense import Dense
from rayfl.determinism.seeding import LazyGenerator
from rayfl.methods.base import Context, Method, PeerHalf, Plan, ServerHalf, Stage, Traits, Work
from rayfl.methods.personal.local import Local
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.wrapper import Wrapping, WrappingClients, WrappingPeers
from tests.contracts.seams.quadratic import Quadratic
from tests.refusals import refused

HOOKS = {
    kind: [
        name
        for half in halves
        for name, value in vars(half).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    for kind, halves in ((Wrapping, (Method, ServerHalf)), (WrappingPeers, (PeerHalf,)))
}
"""The hooks that each kind of wrapper passes on."""
NO_PLACE = {
    "batch",
    "client",
    "coin",
    "delivered",
    "draws",
    "exchange",
    "hook",
    "neighbour",
    "num_clients",
    "plan",
    "ratios",
    "round_number",
    "seed",
    "stage",
    "topology",
    "weights",
}
"""Arguments that have no entries of a wrapper."""
OF_METHOD = {"with_task", "stages"}
"""Hooks of which a wrapper does a part itself; tests below play them."""
OF_STACKS = {"begin_stack", "finish_stack"}
"""Hooks of methods with `whole_stacks`, which no wrapper has."""


class Adding(Wrapping):
    own_names = frozenset({"own"})


class AddingPeers(WrappingPeers):
    own_names = frozenset({"own"})


@pytest.mark.parametrize(("kind", "hook"), [(k, hook) for k, hooks in HOOKS.items() for hook in hooks])
def test_every_hook_is_passed_on_without_the_wrappers_own_entries(kind: type[WrappingClients], hook: str):
    if hook in OF_STACKS:
        assert not Wrapping(FedAvg(Quadratic())).capabilities.whole_stacks
        return
    assert hook in {**vars(Wrapping), **vars(WrappingClients), **vars(WrappingPeers)}
    if hook in OF_METHOD:
        return
    got: dict[str, Any] = {}
    parameters = list(inspect.signature(getattr(kind, hook)).parameters.values())[1:]

    def recorded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        got.update(dict(zip([one.name for one in parameters], args, strict=False)), **kwargs)
        return {"answer": 1}

    wrapper = Adding(FedAvg(Quadratic())) if kind is Wrapping else AddingPeers(Local(Quadratic()))
    setattr(wrapper.inner, hook, recorded)
    given = {one.name: {"own": 0, one.name: 1} for one in parameters}
    positional = [given[one.name] for one in parameters if one.kind is not one.KEYWORD_ONLY]
    named = {one.name: given[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY}
    answer = getattr(wrapper, hook)(*positional, **named)
    assert got == {name: given[name] if name in NO_PLACE else {name: 1} for name in given}
    assert answer in (None, {"answer": 1}, {"answer": 1, "own": 0})


def test_a_wrapper_has_what_the_method_inside_declares():
    """`Capabilities` has a rule for each of its fields; everything else that a method declares is listed here."""
    declared = {name for half in (Method, ServerHalf, PeerHalf) for name in inspect.get_annotations(half)}
    of_wrapper = {"Hyper", "hyper", "paper", "task"}
    assert declared == {"capabilities", "difference", "gather", "splits"} | of_wrapper
    inner = FedAvg(Quadratic())
    wrapper = Wrapping(inner)
    assert (wrapper.difference, wrapper.gather, wrapper.splits) == ("delta", inner.gather, {})


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
        traits_of=lambda client: Traits(client, 4),
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
