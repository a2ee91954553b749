"""Stacks that begin, end and are added up together leave what clients leave that do so one by one, to the bit."""

from collections import Counter
from typing import Any

import pytest

from rayfl.determinism.addition_order import SumNode, cut
from rayfl.errors import Diverged
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Context, Finished, State
from rayfl.methods.personal.ditto import Ditto
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.fedprox import FedProx
from rayfl.methods.server.scaffold import Scaffold
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.rounds import client_round, whole_stacks
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.rounds.whole_stacks import takes_whole_stacks
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from tests.contracts.seams import quadratic
from tests.refusals import refused

FAULTS = {"dropout_after_download": 0.2, "dropout_after_training": 0.2, "upload_loss": 0.2, "work": "capacity"}


def made(method: str, count: int, width: int, clients: dict[str, Any], **settings: Any) -> Setup:
    return prepare(
        Experiment(
            seed=1,
            rounds=3,
            data={"name": "synthetic", "shape": [1, 2, 2], "num_groups": count, "samples_per_group": 7},
            model={"name": "logistic"},
            partition={"name": "natural"},
            method={"name": method, "batch_size": 3, **settings},
            clients={"count": count, "examples_per_s": {"low": 10, "high": 1000}, **clients},
            runtime={"executor": "inline", "engine": "vmap", "stack_width": width},
            evaluation={"every": 2, "pooled": False},
        )
    )


# Any: what a run leaves.
def left_by(setup: Setup) -> Any:
    records, run_states = play(setup)
    return rows(records), contents(InlineExecutor(setup), run_states[-1])


def one_by_one(setup: Setup) -> Setup:
    """The same experiment, whose method does not say that it takes whole stacks."""
    setup.method.capabilities = setup.method.capabilities.but(whole_stacks=False)
    assert not takes_whole_stacks(setup)
    return setup


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"momentum": 0.9}),
        ("fedprox", {"weighting": "uniform", "optimizer": "adam"}),
        ("scaffold", {"weighting": "samples"}),
        ("scaffold", {"option": "I"}),
        ("ditto", {"epochs": 2}),
    ],
)
@pytest.mark.parametrize(
    ("count", "width", "calls", "clients"),
    [(7, 8, 1, {}), (13, 4, 1, FAULTS), (21, 3, 3, {"per_round": 17, **FAULTS})],
)
def test_whole_stacks_leave_the_bits_of_one_by_one(
    method: str,
    settings: dict[str, Any],
    count: int,
    width: int,
    calls: int,
    clients: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    def into_calls(number: int, _: int, stack_width: int = 1, at_most: bool = False) -> list[SumNode]:
        return cut(number, calls, stack_width, at_most)

    monkeypatch.setattr("rayfl.rounds.participants.cut", into_calls)
    setup = made(method, count, width, clients, **settings)
    assert takes_whole_stacks(setup)
    records, bits = left_by(setup)
    wanted, wanted_bits = left_by(one_by_one(made(method, count, width, clients, **settings)))
    assert records == wanted
    assert_same_bits(bits, wanted_bits)


class Doubled(FedAvg):
    """A method from elsewhere that ends clients in its own way, and says nothing of stacks."""

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        moved = {name: 2 * x for name, x in carry["params"].items()}
        return super().finish(state, {**carry, "params": moved}, ctx)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, Scaffold, Ditto, Doubled])
def test_a_subclass_does_not_inherit_hooks_of_whole_stacks(kind: type[FedAvg]):
    setup = quadratic.setup(kind, engine="vmap")
    assert takes_whole_stacks(setup) == (kind is not Doubled)
    heir = type("Heir", (kind,), {})
    assert not takes_whole_stacks(quadratic.setup(heir, engine="vmap"))


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "loop"},
        {"stack_width": 1},
        {"clients": {"deadline_s": 5.0}},
        {"clients": {"take_first": 2}},
    ],
    ids=str,
)
def test_clients_are_ended_one_by_one_where_something_looks_at_one_of_them(options: dict[str, Any]):
    assert not takes_whole_stacks(quadratic.setup(FedAvg, **{"engine": "vmap", **options}))


def test_hooks_of_a_stack_are_called_once_and_no_clients_hook(monkeypatch: pytest.MonkeyPatch):
    called = Counter[str]()
    for module in (client_round, whole_stacks):
        inner = module.checked_hook

        # Any: hooks.
        def counted(hook: Any, inner: Any = inner) -> Any:
            called[hook.__name__] += 1
            return inner(hook)

        monkeypatch.setattr(module, "checked_hook", counted)
    play(quadratic.setup(FedAvg, engine="vmap", rounds=2))
    assert called == {"begin_stack": 2, "finish_stack": 2}


def test_numbers_that_are_not_finite_name_their_client():
    setup = quadratic.setup(FedAvg, engine="vmap")
    setup.dataset.train.inputs[setup.partition.train[2]] = float("nan")
    with refused(names=["round 0, client 2", "NaN"], error=Diverged):
        play(setup)
