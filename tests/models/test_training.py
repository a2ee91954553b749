"""What every model must hold: it learns, its gradient is the same twice, and stacking clients changes nothing."""

import pytest
import torch
from torch import Tensor

from rayfl import tree
from rayfl.choices.kinds import named
from rayfl.data.batches import Batch
from rayfl.models.base import Architecture
from rayfl.models.convolutional import EMNISTCNN
from rayfl.rounds.engines import choose, run_loop, run_vmap
from rayfl.task import BoundTask, NetworkTask
from rayfl.tree import Tree
from tests.methods.reference import setup_of
from tests.models.examples import EXAMPLES, WITH_BUFFERS, batch_of, pad, task_of
from tests.refusals import refused

EVERY_MODEL = pytest.mark.parametrize("name", sorted(EXAMPLES))
NOT_STACKED = {"emnist-cnn": "dropout", "char-lstm": "recurrent layers"}
RATES = {"resnet18": 0.003, "vgg11": 0.003, "char-lstm": 2.0, "mean-embedding": 2.0}
CPU = torch.device("cpu")


def test_every_model_is_tried():
    assert sorted({**EXAMPLES, **WITH_BUFFERS}) == sorted(named(Architecture))


@EVERY_MODEL
def test_steps_along_the_gradient_reduce_the_loss(name: str):
    task, batch = task_of(name), batch_of(name, 4)
    params, losses = task.init(0), []
    rate = RATES.get(name, 0.03)
    for _ in range(3):
        losses.append(task.evaluated_loss(params, batch).item())
        params = tree.add(params, task.grad(params, batch, task.evaluated_loss), -rate)
    assert task.evaluated_loss(params, batch).item() < 0.98 * losses[0]


@EVERY_MODEL
def test_the_gradient_is_the_same_twice(name: str):
    task, batch = task_of(name), batch_of(name, 3)
    params = task.init(1)
    gradients = []
    for _ in range(2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(5)
            gradients.append(task.grad(params, batch))
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in params)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients[0].values())


def doubled(params: Tree) -> Tree:
    return tree.map(lambda tensor: tensor.double(), params)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - set(NOT_STACKED)))
def test_stacked_clients_have_the_gradients_of_single_ones(name: str):
    """In float64, with batches of 3 and 2 examples: the smaller one is padded."""
    task = task_of(name)
    clients = [doubled(task.init(seed)) for seed in range(2)]
    batches = [batch_of(name, size, seed=size) for size in (3, 2)]
    if batches[0].inputs.is_floating_point():
        batches = [Batch(batch.inputs.double(), batch.labels) for batch in batches]
    functional = task.functional()
    stacked = {key: torch.stack([client[key] for client in clients]) for key in clients[0]}
    found = torch.vmap(lambda params, batch: functional.grad(params, batch))(stacked, pad(batches))
    for row, (params, batch) in enumerate(zip(clients, batches, strict=True)):
        for key, wanted in task.grad(params, batch).items():
            torch.testing.assert_close(found[key][row], wanted, rtol=1e-9, atol=1e-12)


def observed(task: NetworkTask, name: str) -> NetworkTask:
    task.network.observe(task.init(0), batch_of(name, 2).inputs)
    return task


@pytest.mark.parametrize("name", sorted(NOT_STACKED))
def test_what_cannot_be_stacked_says_so_and_runs_in_the_loop(name: str):
    task = observed(task_of(name), name)
    assert not task.vmappable
    method = setup_of("fedavg", {}).method.with_task(task)
    assert choose("auto", method, torch.device("cuda"), method.task.init(0)) is run_loop
    with refused(names=["engine='vmap'", "dropout", "recurrent", "engine='loop'"]):
        choose("vmap", method, CPU, {})


def test_without_dropout_the_emnist_network_can_be_stacked():
    task = observed(task_of("emnist-cnn", EMNISTCNN(dropout=(0.0, 0.0))), "emnist-cnn")
    assert task.vmappable and not task.stochastic
    method = setup_of("fedavg", {}).method.with_task(task)
    assert choose("auto", method, torch.device("cuda"), method.task.init(0)) is run_vmap


def losses(task: BoundTask, params: Tree, batch: Batch) -> list[Tensor]:
    return [task.loss(params, batch) for _ in range(3)]


def test_dropout_drops_while_training_alone():
    task, batch = task_of("emnist-cnn"), batch_of("emnist-cnn", 4)
    params = task.init(0)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        assert len({loss.item() for loss in losses(task, params, batch)}) == 3
    kept = task_of("emnist-cnn", EMNISTCNN(dropout=(0.0, 0.0)))
    assert torch.equal(task.evaluated_loss(params, batch), kept.loss(params, batch))


@pytest.mark.parametrize("name", sorted(NOT_STACKED))
def test_the_gradient_in_evaluation_mode(name: str):
    """Elastic aggregation and Dis-PFL ask for it; the plain and the functional form agree."""
    task, batch = task_of(name), batch_of(name, 3)
    params = task.init(2)
    plain = task.grad(params, batch, task.evaluated_loss)
    functional = task.functional()
    again = functional.grad(params, batch, functional.evaluated_loss)
    for key, gradient in plain.items():
        torch.testing.assert_close(gradient, again[key], rtol=1e-5, atol=1e-7)


def test_operations_of_a_forward_pass():
    """Dis-PFL's accounting: 5 epochs of 500 images, three times the forward pass, are 8.33e12 operations."""
    task: NetworkTask = task_of("resnet18")
    with torch.device("meta"):
        sizes = {key: weight.numel() for key, weight in task.network.build().named_parameters()}
    forward = sum(2 * uses * sizes[key] for key, uses in task.weight_uses.items())
    assert 5 * 500 * 3 * forward == pytest.approx(8.33e12, rel=1e-3)
