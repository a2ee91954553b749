"""What every task must hold: its functions, and six methods that train on it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.choices.kinds import named
from rayfl.data.sources.arrays import Arrays
from rayfl.data.sources.conversion import next_tokens
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.tasks.base import Task
from rayfl.testing import contracts
from rayfl.testing.executors import play
from tests.refusals import refused

GENERATOR = np.random.default_rng(0)
VECTORS = GENERATOR.standard_normal((120, 5)).astype(np.float32)
SUMS = VECTORS @ GENERATOR.standard_normal((5, 3)).astype(np.float32)
# Texts of several lengths: each token is the one before, + 1 or + 2.
TEXTS = np.cumsum(GENERATOR.integers(1, 3, (120, 7)), axis=1) % 9 + 1
TEXTS[np.arange(7) >= GENERATOR.integers(3, 8, 120)[:, None]] = 0


class Bigram(nn.Module):
    """What follows each token, by the token alone."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_classes, 6), nn.Linear(6, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).relu())


DATA: Mapping[str, Arrays] = {
    "classification": Arrays(VECTORS, SUMS.argmax(axis=1)),
    "regression": Arrays(VECTORS, SUMS),
    "multilabel": Arrays(VECTORS, (SUMS > 0).astype(np.int64)),
    "next-token": Arrays(TEXTS, next_tokens(TEXTS)),
}


def made(
    task: str, method: str = "fedavg", engine: str = "loop", partition: str = "iid", wrap: Any = (), **options: Any
) -> Setup:
    """Four clients, two rounds; `options` of the method go over those of the contract."""
    return prepare(
        Experiment(
            rounds=2,
            data=DATA[task],
            partition=partition,
            clients={"count": 4},
            model=Bigram if task == "next-token" else {"name": "mlp", "hidden": [6]},
            runtime={"engine": engine},
            wrap=wrap,
            **contracts.task_tables(method, **options),
        )
    )


def test_every_task_has_data_here_and_is_what_its_data_choose():
    assert sorted(DATA) == sorted(named(Task))
    assert {task: made(task).method.task.task.name for task in DATA} == {task: task for task in DATA}  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", DATA)
def test_examples_are_evaluated_one_by_one(task: str):
    contracts.examples_are_evaluated_one_by_one(made(task))


@pytest.mark.parametrize("method", contracts.TASK_METHODS)
@pytest.mark.parametrize("task", DATA)
def test_a_method_trains_on_it(task: str, method: str):
    contracts.a_method_trains_on_it(lambda engine: made(task, method, engine))


@pytest.mark.parametrize("method", ["subfedavg", "lotteryfl"])
@pytest.mark.parametrize("task", ["regression", "next-token"])
def test_a_gate_counts_the_scores_of_the_task(task: str, method: str):
    """A gate of 0 opens, so that a later round trains a smaller model; one of 0.99 stays closed."""
    flops = [play(made(task, method, min_accuracy=gate))[0][-1].means["flops/training"] for gate in (0.0, 0.99)]
    assert flops[0] < flops[1]


@pytest.mark.parametrize("task", DATA)
def test_clients_compare_models_by_the_losses_of_the_task(task: str):
    contracts.several_workers_give_the_bits_of_one(made(task, "fedfomo"))


@pytest.mark.parametrize("task", DATA)
def test_elastic_measures_the_outputs_of_the_task(task: str):
    """The sensitivity of |outputs|^2 reaches the server: updates are then scaled."""
    plain, elastic = (play(made(task, wrap=given))[1][-1].server["params"] for given in ((), "elastic"))
    assert plain.keys() == elastic.keys()
    assert any(not torch.equal(plain[name], elastic[name]) for name in plain)


@pytest.mark.parametrize("task", ["regression", "multilabel", "next-token"])
def test_partitions_by_class_are_refused(task: str):
    with refused(names=["dirichlet-client", "classes", "iid", "natural"]):
        made(task, partition="dirichlet-client")
