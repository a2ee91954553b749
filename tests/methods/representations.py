"""Methods that compare representations, on a small network; and the same network in float64, in plain torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl import tree
from rayfl.data.datasets import Dataset, Examples
from rayfl.models.dense import MLP
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.methods.reference import DIM, NUM_CLASSES, SIZES, assert_close, setup_of, vectors

WIDTH = 5
HEAD = ("3.weight", "3.bias")
"""The parameters of the network's last layer."""


class Dropping(nn.Module):
    """Dropout before the head, which is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.drop = nn.Linear(4, 3), nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.drop(self.body(inputs).relu()))


def small(method: str, hyper: Mapping[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Five clients with unequal numbers of examples; 50 parameters behind relu and before softmax."""
    build = MLP(hidden=(WIDTH,)).builder((DIM,), NUM_CLASSES)
    here = setup_of(method, {"lr": 0.3, "batch_size": 4, **hyper}, build=build, rounds=4, **options)
    evaluation = Evaluation(pooled=False)
    method_here = here.method.with_task(classification(build, (DIM,)))
    made = replace(here, method=method_here, evaluation=evaluation, engine_name=engine, stack_width=5)
    check_setup(made)
    return made


def lacking_classes() -> Dataset:
    """Vectors of which client 1 has class 0 alone, and client 3 none of class 2."""
    dataset, starts = vectors(), np.cumsum([0, *SIZES])
    labels = dataset.train.labels.copy()
    labels[starts[1] : starts[2]] = 0
    labels[starts[3] : starts[4]] %= 2
    return replace(dataset, train=Examples(dataset.train.inputs, labels))


def doubled(params: Mapping[str, Any]) -> Tree:
    """The parameters in float64."""
    return {name: torch.as_tensor(np.asarray(value)).double() for name, value in params.items()}


def representation(params: Tree, inputs: Tensor) -> Tensor:
    """relu(W_1 a + b_1), [batch, WIDTH]."""
    return (inputs @ params["1.weight"].T + params["1.bias"]).relu()


def cross_entropy(params: Tree, features: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(features @ params["3.weight"].T + params["3.bias"], labels)


def examples(here: Setup, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs in float64, and labels, of train examples."""
    examples = here.dataset.train
    return torch.from_numpy(examples.inputs[rows]).double(), torch.from_numpy(examples.labels[rows])


def stepped(params: Tree, loss: Tensor, lr: float) -> Tree:
    """The parameters, leaves of `loss`, after a step of gradient descent."""
    gradients = torch.autograd.grad(loss, list(params.values()))
    return {
        name: (value - lr * g).detach().requires_grad_()
        for (name, value), g in zip(params.items(), gradients, strict=True)
    }


def leaves(params: Tree) -> Tree:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def state_of(here: Setup, run_state: RunState, client: int) -> Tree:
    """The model in a client's state; of a client that was never there its first one."""
    if client not in run_state.states:
        return here.first_state(client)["params"]
    return tree.to_tensors(InlineExecutor(here).get(run_state.states[client]))["params"]


def stored(here: Setup, run_state: RunState, client: int) -> Mapping[str, Any]:
    """A client's state; of a client that was never there its first one."""
    if client not in run_state.states:
        return here.first_state(client)
    return tree.to_tensors(InlineExecutor(here).get(run_state.states[client]))


def averaged(here: Setup, x: Tree, ends: Mapping[int, Tree]) -> Tree:
    """The weighted mean of the clients' trained tensors with the names of `x`; x itself if there is none."""
    hyper = here.method.hyper.model_dump()
    weights = {i: 1.0 if hyper["weighting"] == "uniform" else len(here.partition.train[i]) for i in ends}
    total = sum(weights.values())
    return {n: sum(weights[i] / total * ends[i][n].detach() for i in ends) if ends else x[n] for n in x}  # type: ignore


def assert_near(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-6) -> None:
    """Trees in float32 and in float64: `tolerance` times the largest entry apart at most."""
    assert found.keys() == wanted.keys()
    entries, expected = (
        np.concatenate([np.ravel(tensors[name].detach()) for name in wanted]) for tensors in (found, wanted)
    )
    assert_close(entries, expected, tolerance)
