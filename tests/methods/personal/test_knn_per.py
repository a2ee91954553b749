"""kNN-Per against neighbours found one by one, FedAvg to the bit, and the choice of lam."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.partition import Shards
from rayfl.methods.personal.knn_per import KNNPer
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES
from tests.methods.reference import NUM_CLASSES, SIZES
from tests.methods.representations import doubled, examples, representation, small
from tests.refusals import refused


def made(hyper: dict[str, Any], **options: Any) -> Setup:
    """Every third example of a client is set aside."""
    here = small("fedavg", {}, **options)
    method = KNNPer(here.method.task, KNNPer.Hyper(**{"lr": 0.3, "batch_size": 4, **hyper}))
    shards = [here.partition.train[i] for i in range(5)]
    train, validation = ([rows[np.arange(len(rows)) % 3 == 0] for rows in shards] for _ in range(2))
    train = [np.setdiff1d(rows, held) for rows, held in zip(shards, validation, strict=True)]
    partition = replace(here.partition, train=Shards.of(train), validation=Shards.of(validation))
    return replace(here, method=method, partition=partition)


def mixed(here: Setup, x: Tree, client: int, inputs: torch.Tensor, lam: float) -> np.ndarray:
    """p [n, C] by the paper's sums."""
    hyper = here.method.hyper.model_dump()
    stored, labels = examples(here, here.partition.train[client])
    keys, z = representation(x, stored).numpy(), representation(x, inputs)
    softmax = (z @ x["3.weight"].T + x["3.bias"]).softmax(1).numpy()
    near = np.zeros((len(inputs), NUM_CLASSES))
    for row, query in enumerate(z.numpy()):
        distances = np.sqrt(((keys - query) ** 2).sum(1))
        if hyper["distance"] == "squared":
            distances = distances**2 / keys.shape[1]
        order = np.argsort(distances, kind="stable")[: hyper["neighbours"]]
        weights = np.exp(-distances[order] / hyper["scale"])
        for place, weight in zip(order, weights / weights.sum(), strict=True):
            near[row, labels[place]] += weight
    return lam * near + (1 - lam) * softmax


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [{"lam": 0.6, "neighbours": 3}, {"neighbours": 2, "scale": 0.1}, {"distance": "euclidean", "epochs": 2}],
    ids=str,
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, clients=clients)
    records, run_states = play(here)
    chosen = set()
    for record, run_state in zip(records, run_states, strict=True):
        x = doubled(run_state.server["params"])
        for client in range(5):
            lam = hyper.get("lam")
            if lam is None:
                inputs, labels = examples(here, here.partition.validation[client])
                right = [
                    (mixed(here, x, client, inputs, value / 100).argmax(1) == labels.numpy()).sum()
                    for value in range(101)
                ]
                lam = int(np.argmax(right)) / 100
                chosen.add(lam)
            rows, test = here.partition.test[client], here.dataset.test
            p = mixed(here, x, client, torch.from_numpy(test.inputs[rows]).double(), lam)
            wanted = -np.log(p[np.arange(len(rows)), test.labels[rows]].clip(1e-30)).mean()
            found = [m.value for m in record.metrics if (m.client, m.name) == (client, "own/loss")]
            assert found == pytest.approx([wanted], rel=2e-3, abs=1e-4)
    assert "lam" in hyper or len(chosen) > 1


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_training_is_that_of_fedavg_to_the_bit(lam: float):
    here, plain = made({"lam": lam}), replace(made({}), method=small("fedavg", {}).method)
    (records, run_states), (others, other_states) = play(here), play(plain)
    for run_state, other in zip(run_states, other_states, strict=True):
        for name, tensor in other.server["params"].items():
            assert torch.equal(run_state.server["params"][name], tensor)
    losses, plain_losses = (
        [m.value for r in rows for m in r.metrics if m.name == "own/loss" and m.client is not None]
        for rows in (records, others)
    )
    # Without neighbours the outputs are those of FedAvg, too.
    assert (losses == pytest.approx(plain_losses)) == (lam == 0)
    assert [r.row.uplink_bits for r in records] == [r.row.uplink_bits for r in others]


def test_equally_near_examples_count_in_the_order_of_the_memory_and_the_memory_is_bounded():
    method = made({"neighbours": 2}).method
    assert isinstance(method, KNNPer)
    memory = {"memory/keys": torch.tensor([[1.0], [-1.0], [1.0]]), "memory/labels": torch.tensor([2, 0, 1])}
    assert method.shares(torch.zeros(1, 1), memory, 3).tolist() == [[0.5, 0.0, 0.5]]
    here = made({"capacity": 3})
    assert max(SIZES) > 3
    carry = here.method.eval_begin({}, here.initial, None, here.context(0, here.plan(0), 0, "judge"))
    stage = here.method.eval_stages(0)[0]
    for batch in (here.data(4).all("train"),) * 2:
        carry = here.method.step(carry, batch, stage=stage)
    assert carry["memory"]["memory/keys"].shape == (3, 5) and len(carry["memory"]["memory/labels"]) == 3


def test_what_does_not_fit_is_refused():
    with refused(names=["KNNPer", "last linear layer"]):
        on_digits("knn_per")(model="logistic")
    with refused(names=["lam", "1"]):
        KNNPer.Hyper(lam=1.5)
