"""Whatever draws from whichever global generator: the same bits again, on several workers, and after a stop."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.errors import MethodError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.contracts import a_run_goes_on_from_its_checkpoint
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from tests.determinism import drawing
from tests.refusals import mentions, refused

NUM_CLIENTS = 5
BASE: Mapping[str, Any] = {
    "rounds": 2,
    "seed": 3,
    "data": {"name": "synthetic", "samples_per_group": 12, "num_groups": 10, "num_classes": 4, "dim": 8},
    "partition": "iid",
    "clients": {"count": NUM_CLIENTS},
    "model": "logistic",
    "method": {"name": "fedavg", "lr": 0.1, "batch_size": 8},
}
Make = Callable[..., Setup]


# Any: tables of an experiment.
def maker(**given: Any) -> Make:
    def make(**options: Any) -> Setup:
        tables = {**BASE, **given, **options}
        tables["clients"] = {**BASE["clients"], **given.get("clients", {}), **options.get("clients", {})}
        return prepare(Experiment(**tables))

    return make


def in_other_states(seed: int) -> tuple[Tensor, Any, Any]:
    """Put the global generators into other states, and return these; a normal number of numpy's is left over."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    np.random.normal()
    return states()


def states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def are_same(a: tuple[Tensor, Any, Any], b: tuple[Tensor, Any, Any]) -> bool:
    return torch.equal(a[0], b[0]) and str(a[1]) == str(b[1]) and a[2] == b[2]


def keeps_its_bits(make: Make, folder: Path) -> None:
    before = in_other_states(1)
    here = make()
    records, run_states = play(here)
    assert are_same(before, states()), "a run leaves the generators of the program alone"
    in_other_states(2)
    again = make()
    executors = InlineExecutor(again), Shuffled(again)
    for executor in executors:
        others, other_states = play(again, executor)
        assert rows(records) == rows(others)
        assert_same_bits(contents(InlineExecutor(here), run_states[-1]), contents(executor, other_states[-1]))
    in_other_states(3)
    a_run_goes_on_from_its_checkpoint(make, NUM_CLIENTS, folder)


@pytest.mark.parametrize("model", drawing.MODELS, ids=lambda one: one.__name__)
def test_models(model: type[nn.Module], tmp_path: Path):
    keeps_its_bits(maker(model=model), tmp_path)


@pytest.mark.parametrize(("method", "hyper"), drawing.METHODS, ids=lambda one: getattr(one, "__name__", ""))
def test_hooks_of_methods(method: type[Method], hyper: Mapping[str, Any], tmp_path: Path):
    graph = {"topology": "ring"} if issubclass(method, PeerHalf) else {}
    keeps_its_bits(maker(method={"name": method, "lr": 0.1, "batch_size": 8, **hyper}, **graph), tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"uplink": drawing.NoisyTopK(keep_ratio=0.5)},
        {"selection": drawing.Shuffling(), "clients": {"per_round": 3}},
        {"evaluation": {"metrics": [drawing.NoisyAccuracy()], "train": True}},
        {"schedule": drawing.Jittered(buffer=2), "clients": {"per_round": 3}},
        {"model": drawing.Sampled, "selection": "power-of-choice", "clients": {"per_round": 2}},
        {"model": drawing.Sampled, "method": {"name": "ditto", "lr": 0.1}, "clients": {"unseen": 0.2}},
        {"model": drawing.Functional, "method": {"name": "fedavg_ft", "lr": 0.1}},
    ],
    ids=["compressor", "selection", "metric", "schedule", "poll", "unseen", "evaluation stages"],
)
def test_other_plugins(given: Mapping[str, Any], tmp_path: Path):
    keeps_its_bits(maker(**given), tmp_path)


def test_clients_rounds_and_seeds_draw_other_numbers():
    first, other = (play(maker(method={"name": Telling}, seed=seed)())[0] for seed in (3, 4))
    told = [metric.value for record in (*first, *other) for metric in record.metrics if metric.name == "told"]
    # Of two seeds, two rounds and five clients, and the mean over the clients of each round.
    assert len({*told}) == 2 * 2 * (NUM_CLIENTS + 1)


class Telling(FedAvg):
    """Reports a draw of numpy's."""

    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        finished = super().finish(state, carry, ctx)
        return replace(finished, metrics={"told": np.random.rand()})


class Silent(FedAvg):
    """Its step draws by numpy, which vmap does not notice."""

    def step(self, carry: Any, batch: Any, *, stage: Any) -> Any:
        return super().step(drawing.shaken(carry) if self.loud else _numpy(carry), batch, stage=stage)

    loud = False


class Loud(Silent):
    """Its step draws by torch, which vmap refuses."""

    loud = True


def _numpy(carry: Any) -> Any:
    params = {name: tensor + float(np.random.rand()) for name, tensor in carry["params"].items()}
    return {**carry, "params": params}


@pytest.mark.parametrize("model", [drawing.Functional, drawing.NumpyNoise, drawing.Depth], ids=lambda m: m.__name__)
def test_a_stack_cannot_draw(model: type[nn.Module]):
    with refused(names=["engine='vmap'", "random", "engine='loop'"]):
        maker(model=model, runtime={"engine": "vmap"})()


@pytest.mark.parametrize(("method", "whose"), [(Silent, "numpy"), (Loud, "torch")], ids=["numpy", "torch"])
def test_a_stack_that_draws_unexpectedly_ends_the_run(method: type[Method], whose: str):
    setup = maker(method={"name": method, "lr": 0.1, "batch_size": 8}, runtime={"engine": "vmap"})()
    with pytest.raises(MethodError) as caught:
        play(setup)
    facts = ("round 0", method.__name__, "step", f"{whose}'s", "runtime.engine='loop'")
    assert all(mentions(str(caught.value), one) for one in facts), caught.value


def test_a_model_that_draws_only_in_evaluation_may_be_stacked(tmp_path: Path):
    keeps_its_bits(maker(model=drawing.OnlyEvaluation, runtime={"engine": "vmap"}), tmp_path)


class Own(drawing.Drawing):
    """A generator of its own, whose state each process has for itself."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.draws = np.random.default_rng(0)

    def hide(self, hidden: Tensor) -> Tensor:
        return hidden + float(self.draws.random())


class SecondPass(drawing.Drawing):
    """Draws from its second pass on."""

    passes = 0

    def hide(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden + torch.randn_like(hidden) if self.passes > 1 else hidden


@pytest.mark.parametrize("model", [Own, SecondPass], ids=lambda one: one.__name__)
def test_a_model_that_remembers_its_passes_is_refused(model: type[nn.Module]):
    with refused(names=["model", "training", "passes", "generator"]):
        maker(model=model)()
