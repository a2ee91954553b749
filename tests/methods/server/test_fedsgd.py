"""FedSGD against gradients in closed form, against FedAvg with one step, and what a gradient gives away."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.compress.sparse import TopK
from rayfl.data.batches import Batch
from rayfl.methods.server.fedsgd import FedSGD
from rayfl.task import BoundTask
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from rayfl.tree import Tree
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.contracts.seams.quadratic import TRAIN
from tests.methods.averaging import ABSENCES, ENGINES, assert_follows, made
from tests.methods.reference import NUM_CLASSES, setup_of
from tests.population.statuses import with_status


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [{}, {"weighting": "uniform", "lr_decay": 0.8}, {"batch_size": 2}, {"l2": 0.5, "batch_size": 3}],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equation(hyper: dict[str, Any], clients: dict[str, Any], engine: str):
    here = made("fedsgd", {"lr": 0.3, **hyper}, rounds=6, engine=engine, clients=clients)
    uniform, x, path = hyper.get("weighting") == "uniform", start(here), []
    for round in range(6):
        total, weights = np.zeros(10), 0.0
        for client in with_status(here.population.sample_round(round), "delivered"):
            size = hyper.get("batch_size") or TRAIN[client]
            (batch,) = batches(here, round, client, steps=1, batch_size=size)
            weight = 1.0 if uniform else TRAIN[client]
            total, weights = total + weight * (batch.gradient(x) + hyper.get("l2", 0.0) * x), weights + weight
        if weights:
            x = x - 0.3 * hyper.get("lr_decay", 1.0) ** round * total / weights
        path.append(x)
    records, run_states = play(here)
    assert_follows(run_states, path)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(320 if uniform else 384, 320)}
    assert {row.num_steps for row in delivered} == {1}


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_is_fedavg_with_one_step(weighting: str, batch_size: int, clients: dict[str, Any]):
    common = {"lr": 0.3, "batch_size": batch_size, "weighting": weighting, "lr_decay": 0.9}
    once = play(made("fedsgd", common, rounds=5, clients=clients))
    other = play(made("fedavg", {**common, "steps": 1}, rounds=5, clients=clients))
    for (one, two), (record, twin) in zip(
        zip(once[1], other[1], strict=True), zip(once[0], other[0], strict=True), strict=True
    ):
        np.testing.assert_allclose(flat(one.server["params"]), flat(two.server["params"]), rtol=1e-5, atol=1e-6)
        assert (record.row.uplink_bits, record.row.downlink_bits) == (twin.row.uplink_bits, twin.row.downlink_bits)


def test_the_minimum_is_that_of_the_pooled_samples():
    # With weights by examples the mean gradient is that of all examples: x* = sum a c / sum a over them.
    here = made("fedsgd", {"lr": 0.5}, rounds=60)
    everyone = [points(here, client) for client in range(4)]
    a, c = (np.concatenate([getattr(client, name) for client in everyone]) for name in ("a", "c"))
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), (a * c).sum(axis=0) / a.sum(axis=0), atol=1e-5)


def test_the_uplink_compresses_the_gradient():
    here, log = watched(made("fedsgd", {"lr": 0.3}, rounds=1, uplink=TopK(keep_ratio=0.5)))
    play(here)
    for client in range(4):
        sent = flat(log.up[0, client]["gradient"].decode())
        gradient = points(here, client).gradient(start(here))
        largest = np.zeros(10, bool)
        for part, k in ((slice(0, 8), 4), (slice(8, 10), 1)):
            largest[part] = np.abs(gradient[part]) >= np.sort(np.abs(gradient[part]))[-k]
        np.testing.assert_allclose(sent, np.where(largest, gradient, 0), rtol=1e-5, atol=1e-6)


class Line(BoundTask):
    """y = a x + b with the squared error (a x + b - y)^2 of one point."""

    def init(self, seed: int) -> Tree:
        return {"a": torch.tensor(0.5), "b": torch.tensor(-1.0)}

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        return ((params["a"] * batch.inputs + params["b"] - batch.labels) ** 2).mean()

    def losses(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def test_a_gradient_on_the_wire_gives_the_point_away():
    # df/da = 2 x (a x + b - y) and df/db = 2 (a x + b - y), so x = (df/da) / (df/db), and y = a x + b - (df/db) / 2.
    x, y = 1.75, 4.0
    here = made("fedsgd", {"weighting": "uniform"})
    method, plan = FedSGD(Line(), FedSGD.Hyper(weighting="uniform")), here.plan(0)
    params = method.task.init(0)
    carry = method.step(method.start(params), Batch(torch.tensor([x]), torch.tensor([y])), stage=plan.stages[0])
    upload = method.finish({}, carry, here.context(0, plan, 0, "client")).message
    assert upload is not None and list(upload) == ["gradient"] and isinstance(upload["gradient"], dict)
    sent = {name: float(tensor) for name, tensor in upload["gradient"].items()}
    assert sent["a"] / sent["b"] == pytest.approx(x, rel=1e-6)
    assert float(params["a"]) * x + float(params["b"]) - sent["b"] / 2 == pytest.approx(y, rel=1e-6)


def test_a_linear_layer_gives_an_example_away():
    # dW = (p - onehot) x^T and db = p - onehot: every row of dW over its entry of db is x; the label has db < 0.
    here, log = watched(setup_of("fedsgd", {}, sizes=(1, 1, 1), rounds=1))
    play(here)
    for client in range(3):
        sent = log.up[0, client]["gradient"].decode()
        ((row),) = here.partition.train[client]
        for c in range(NUM_CLASSES):
            x = sent["1.weight"][c] / sent["1.bias"][c]
            np.testing.assert_allclose(x.numpy(), here.dataset.train.inputs[row].ravel(), rtol=1e-5)
        assert int(sent["1.bias"].argmin()) == here.dataset.train.labels[row]
