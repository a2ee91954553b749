"""Losses and scores by hand, the task that follows from the data, and what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.data.sources.arrays import Arrays
from rayfl.data.sources.conversion import next_tokens
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.tasks.base import Task
from rayfl.tasks.supervised import Multilabel, NextToken, Regression
from tests.refusals import refused

VECTORS = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
CLASSES = np.arange(20) % 2
TOKENS = np.random.default_rng(1).integers(1, 9, (20, 6))

# Any: tables of an experiment.
SMALL: dict[str, Any] = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "model": "mlp", "method": "fedavg"}


# Any: tables of an experiment.
def prepared(data: object, **tables: Any) -> Setup:
    return prepare(Experiment(**{**SMALL, "data": data, **tables}))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        # Differences 1 and -3: (1 + 9) / 2, (1 + 3) / 2; Huber with delta 2: (1 / 2 + 2 (3 - 1)) / 2.
        (Regression(), 5.0),
        (Regression(error="absolute"), 2.0),
        (Regression(error="huber", delta=2.0), 2.25),
    ],
)
def test_errors_of_a_regression(task: Regression, expected: float):
    outputs, targets = torch.tensor([[1.0, -3.0], [4.0, 4.0]]), torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    sums, counts = task.loss(outputs, targets)
    assert sums.tolist() == [expected, 0.0] and counts.tolist() == [1.0, 1.0]
    assert task.score(outputs, targets).tolist() == pytest.approx([1 / (1 + expected), 1.0])


def test_labels_of_a_multilabel_task():
    outputs, targets = torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([[1, 1, 1]])
    sums, _ = Multilabel().loss(outputs, targets)
    # log(1 + exp(-z)) for a yes.
    assert sums.item() == pytest.approx(sum(math.log1p(math.exp(-z)) for z in (0.0, 2.0, -1.0)) / 3)
    assert Multilabel().score(outputs, targets).item() == pytest.approx(1 / 3)


def test_a_mean_over_tokens_is_no_mean_over_texts():
    """A text of one token that is hard, one of three that are easy: (2 + 3 * 0.5) / 4, not (2 + 0.5) / 2."""
    # With two tokens and logits (z, 0) the loss of token 0 is log(1 + exp(-z)).
    hard, easy = (-math.log(math.expm1(loss)) for loss in (2.0, 0.5))
    outputs = torch.zeros(2, 3, 2)
    outputs[0, :, 0], outputs[1, :, 0] = hard, easy
    targets = torch.tensor([[0, -1, -1], [0, 0, 0]])
    task = NextToken()
    sums, counts = task.loss(outputs, targets)
    assert counts.tolist() == [1.0, 3.0] and sums.tolist() == pytest.approx([2.0, 1.5])
    assert task.mean_loss(outputs, targets).item() == pytest.approx(0.875)
    assert (sums / counts).mean().item() == pytest.approx(1.25)
    # Twice the second text, and no first one: three tokens count.
    assert task.mean_loss(outputs, targets, torch.tensor([0.0, 2.0])).item() == pytest.approx(0.5)
    assert task.mean_loss(outputs, torch.full((2, 3), -1)).item() == 0.0
    assert task.score(outputs, targets).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (CLASSES, "classification"),
        (VECTORS, "regression"),
        (np.ones((20, 2), np.int64), "multilabel"),
    ],
)
def test_the_task_follows_from_the_labels(labels: np.ndarray, name: str):
    task = prepared(Arrays(VECTORS, labels)).method.task
    assert task.task.name == name  # type: ignore[attr-defined]


def test_whole_numbers_may_be_given_another_task():
    setup = prepared(Arrays(VECTORS, np.ones((20, 2), np.int64)), task={"name": "regression", "error": "absolute"})
    assert setup.method.task.task == Regression(error="absolute")  # type: ignore[attr-defined]


class Pair(nn.Module):
    """Two logits for each of a text's tokens, whatever their number."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


@pytest.mark.parametrize(
    ("data", "tables", "names"),
    [
        (Arrays(VECTORS, VECTORS), {"task": "classification"}, ["classification", "float32 [16, 3]", "one class"]),
        (Arrays(VECTORS, np.eye(2)[CLASSES]), {}, ["classification", "labels.argmax(1)", "multilabel"]),
        (Arrays(VECTORS, CLASSES), {"task": "regression"}, ["regression", "[n, outputs]", "int64 [16]"]),
        (Arrays(VECTORS, VECTORS), {"task": "multilabel"}, ["multilabel", "0 or 1", "float32"]),
        (Arrays(VECTORS, CLASSES), {"task": "next-token"}, ["next-token", "[n, 3]", "int64 [16]"]),
        (Arrays(TOKENS, next_tokens(TOKENS)), {"model": Pair}, ["Pair", "[2, 6, 2]", "[2, 6, 9]", "next-token"]),
        (Arrays(TOKENS, next_tokens(TOKENS)), {"model": "mlp"}, ["mlp", "char-lstm with predicts='all'"]),
        (Arrays(TOKENS, next_tokens(TOKENS)), {"model": "char-lstm"}, ["[2, 6, 9]", "model.predicts='all'"]),
        (
            Arrays(TOKENS, CLASSES),
            {"model": {"name": "char-lstm", "predicts": "all", "vocabulary": 9}},
            ["[2, 2]", "model.predicts='last'"],
        ),
        (Arrays(VECTORS, VECTORS), {"task": "regresion"}, ["regresion", "regression"]),
        (Arrays(VECTORS, CLASSES + 0.5), {}, ["0.5", "[n, outputs]"]),
    ],
)
def test_data_model_and_task_that_do_not_fit_are_refused(data: Arrays, tables: dict, names: list[str]):
    with refused(names=names):
        prepared(data, **tables)


STRANGE = """
import torch
from rayfl.tasks.base import Task

class Mean(Task):
    def loss(self, outputs, targets):
        return outputs.mean(), outputs.mean()
    def score(self, outputs, targets):
        return outputs[:, 0]
    def check(self, dataset, network):
        pass

class Alone(Mean):
    def loss(self, outputs, targets):
        return outputs.sum(dim=1)

class Far(Mean):
    def loss(self, outputs, targets):
        return outputs.sum(dim=1), torch.ones(len(outputs))
    def score(self, outputs, targets):
        return 0 * outputs[:, 0] + 3.5

class Fails(Mean):
    def loss(self, outputs, targets):
        raise KeyError("colour")

class Cut(Far):
    def loss(self, outputs, targets):
        return outputs.sum(dim=1).detach(), torch.ones(len(outputs))

class Unjudged(Far):
    def score(self, outputs, targets):
        return 0 * outputs[:, 0]
    def default_metrics(self):
        return ()

class Named(Unjudged):
    def default_metrics(self):
        return ("accuracy",)
"""


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Mean", ["Mean", "losses", "float32 []", "[2]"]),
        ("Alone", ["Alone", "sums", "counts"]),
        ("Far", ["Far", "score", "3.5", "0 to 1"]),
        ("Fails", ["Fails", "KeyError", "colour", "strange.py:25"]),
        ("Cut", ["Cut", "losses", "outputs", "learned"]),
        ("Unjudged", ["Unjudged", "default_metrics", "[]", "Loss()"]),
        ("Named", ["Named", "default_metrics", "['accuracy']", "Loss()"]),
    ],
)
def test_a_strangers_task_that_gives_the_wrong_things_is_refused(tmp_path: Path, name: str, names: list[str]):
    (tmp_path / "strange.py").write_text(STRANGE)
    with refused(names=names):
        prepared(Arrays(VECTORS, VECTORS), task=f"{tmp_path}/strange.py:{name}")


def test_a_task_is_given_as_an_object_and_comes_back_from_its_table():
    task = Regression(error="huber", delta=0.5)
    made = Experiment(**SMALL, data=Arrays(VECTORS, VECTORS), task=task)
    assert made.task == task and isinstance(made.task, Task)
    assert made.as_dict()["task"] == {"name": "regression", "error": "huber", "delta": 0.5}
    with pytest.raises(RayflError):
        Regression(delta=0.5)
