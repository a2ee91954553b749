"""The models that a run saves are those that it evaluated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import find
from rayfl.methods.base import Capabilities, Carry, Context, Finished, ModelState, State, Tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.model_sums import model_sums, values
from rayfl.rounds.run_state import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import Shuffled, play
from rayfl.topology.graphs import Topology
from tests.methods.reference import setup_of

HYPER = {"lr": 0.5, "batch_size": 2}


class SharedBody(FedAvg):
    """FedAvg whose clients keep their biases, as in FedRep: body from the server, head from the client."""

    capabilities = Capabilities(personalized=True)

    def init_client(self, client: Any, params: Tree, draws: Any) -> State:
        return {"head": params["1.bias"]}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        done = super().finish(state, carry, ctx)
        return Finished({"head": carry["params"]["1.bias"]}, done.message, done.weight, done.metrics)

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> ModelState:
        whole = carry["params"] if carry is not None else model
        assert whole is not None
        return {"params": {**whole, "1.bias": state["head"]}}


class TrainedBody(SharedBody):
    """The same, with a final model of its own."""

    def final_model(self, state: State, server: State) -> Tree:
        return {**server["params"], "1.bias": state["head"] + 1}


METHODS: dict[Any, dict[str, Any]] = {
    "fedavg_ft": HYPER,
    "perfedavg": HYPER,
    "dpsgd_ft": HYPER,
    "ditto": HYPER,
    "pfedme": {"lr": 0.05, "batch_size": 2},
    "l2gd": {"batch_size": 2, "lam": 0.1},
    SharedBody: HYPER,
}


def made(method: Any, hyper: Mapping[str, Any]) -> Setup:
    here = setup_of(method, hyper)
    return replace(here, topology=find(Topology, "ring")()) if method == "dpsgd_ft" else here


def ended(method: type[FedAvg]) -> tuple[Setup, RunState]:
    """The setup of a method, and the run state after its rounds."""
    here = made(method, HYPER)
    return here, play(here)[1][-1]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("executor", [InlineExecutor, Shuffled])
def test_what_is_saved_is_what_was_evaluated(method: Any, executor: type[InlineExecutor]):
    here = made(method, METHODS[method])
    engine = executor(here)
    records, run_states = play(here, engine)
    evaluated = {(one.client, one.name): one.value for one in records[-1].metrics}
    saved = dict(personal_models(here, engine, run_states[-1]))
    assert sorted(saved) == list(range(here.num_clients))
    for client, model in saved.items():
        found = values(here, model_sums(here, model, "test", here.partition.test[client]).total.sums)
        assert found["loss"] == pytest.approx(evaluated[client, "own/loss"], rel=1e-6)


def test_a_method_may_name_another_model_from_both_states():
    here, run_state = ended(TrainedBody)
    for client, model in personal_models(here, InlineExecutor(here), run_state):
        server = run_state.server["params"]
        assert torch.equal(model["1.weight"], server["1.weight"])
        head = torch.from_numpy(np.array(run_state.states[client]["head"]))
        assert torch.equal(model["1.bias"], head + 1)
