"""BatchNorm whose padding does not count, against torch's own layers on the rows that count."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rayfl.data.batches import Batch
from rayfl.methods.shared.own_parts import ClientTask
from rayfl.models.batch_norm import Rows, count_rows
from rayfl.task import NetworkTask
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.refusals import refused

TOLERANCE = 2e-7


def network(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.BatchNorm1d(8, momentum=momentum),
        nn.Linear(8, 10),
    )


def batch(size: int, padding: int = 0) -> Batch:
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(size + padding, 1, 8, 8, generator=draws)
    labels = torch.randint(0, 10, (size + padding,), generator=draws)
    return Batch(inputs, labels, torch.cat([torch.ones(size), torch.zeros(padding)]) if padding else None)


def task_of(build: Callable[[], nn.Module]) -> tuple[NetworkTask, Tree, Tree]:
    """The task, its parameters and its buffers."""
    task = classification(build, (1, 8, 8))
    weights = task.network.first_weights(7)
    moving = task.network.changed_buffers(batch(2).inputs)
    params = task.network.keep_constants(weights, (), moving)
    return task, params, {name: tensor for name, tensor in weights.items() if name in moving}


def by_torch(params: Tree, buffers: Tree, given: Batch, build: Callable[[], nn.Module]) -> tuple[Tensor, Tree, Tree]:
    """Loss, gradient and buffers of torch's own layers on the rows that count."""
    module = build()
    module.load_state_dict({**params, **buffers})
    count = len(given.labels) if given.weights is None else int(given.weights.sum())
    loss = nn.functional.cross_entropy(module(given.inputs[:count]), given.labels[:count])
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradient, dict(module.named_buffers())


def assert_near(found: Tree, expected: Tree, tolerance: float = TOLERANCE) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("given", [batch(12), batch(12, padding=5)], ids=["all rows", "padded"])
def test_padding_enters_no_statistics(given: Batch, momentum: float | None):
    def build() -> nn.Module:
        return network(momentum)

    task, params, buffers = task_of(build)
    loss, gradient, moved = by_torch(params, buffers, given, build)
    client = ClientTask(task, buffers)
    found, own = client.value_and_grad(params, given)
    assert float(found - loss) == pytest.approx(0, abs=TOLERANCE)
    assert_near(own, gradient)
    assert_near(client.moved, moved)


def test_a_stack_computes_what_each_client_does_alone():
    task, params, buffers = task_of(network)
    twin, given = task.functional(), [batch(12, padding=4), batch(16), batch(1, padding=15)]
    assert isinstance(twin, NetworkTask)
    weights = [torch.ones(16) if one.weights is None else one.weights for one in given]
    stacked = Batch(
        torch.stack([one.inputs for one in given]), torch.stack([one.labels for one in given]), torch.stack(weights)
    )

    def step(given: Batch) -> tuple[Tensor, Tree, Tree]:
        client = ClientTask(twin, buffers)
        return *client.value_and_grad(params, given), client.moved

    losses, gradients, moved = torch.vmap(step, in_dims=(Batch(0, 0, 0),))(stacked)  # pyright: ignore[reportArgumentType]
    for row, one in enumerate(given):
        client, count = ClientTask(task, buffers), int(weights[row].sum())
        loss, gradient = client.value_and_grad(params, Batch(one.inputs[:count], one.labels[:count]))
        assert float(losses[row] - loss) == pytest.approx(0, abs=1e-6)
        assert_near({name: tensor[row] for name, tensor in gradients.items()}, gradient, 1e-6)
        assert_near({name: tensor[row] for name, tensor in moved.items()}, client.moved, 1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_single_value_per_channel_uses_the_running_statistics(by_hand: bool):
    layer, rows = nn.BatchNorm1d(3), Rows()
    layer(torch.randn(9, 3))
    before, evaluated = copy.deepcopy(dict(layer.named_buffers())), copy.deepcopy(layer).eval()
    count_rows(layer, rows)
    rows.by_hand = by_hand
    one = torch.randn(1, 3)
    torch.testing.assert_close(layer(one), evaluated(one))
    assert_near(dict(layer.named_buffers()), before)


def test_one_image_has_statistics_of_its_pixels():
    layer, rows = nn.BatchNorm2d(3), Rows()
    plain, image = copy.deepcopy(layer), torch.randn(1, 3, 4, 4)
    count_rows(layer, rows)
    torch.testing.assert_close(layer(image), plain(image))
    assert_near(dict(layer.named_buffers()), dict(plain.named_buffers()))


def test_fixed_statistics_are_used_in_training_and_stay():
    layer, rows = nn.BatchNorm2d(3), Rows()
    rows.fixed = True
    evaluated, images = copy.deepcopy(layer).eval(), torch.randn(5, 3, 4, 4)
    count_rows(layer, rows)
    assert torch.equal(layer(images), evaluated(images))
    assert_near(dict(layer.named_buffers()), dict(evaluated.named_buffers()))


def test_the_memory_of_the_given_buffers_is_not_written_to():
    task, params, buffers = task_of(network)
    before = copy.deepcopy(buffers)
    ClientTask(task, buffers).value_and_grad(params, batch(6))
    task.evaluated({**params, **buffers}, batch(6))
    assert_near(buffers, before)


def test_statistics_of_the_evaluated_examples_are_refused():
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4, track_running_stats=False))

    with refused(names=["'2'", "BatchNorm1d", "track_running_stats"]):
        classification(build, (1, 8, 8))


class Halved(nn.BatchNorm1d):
    """Somebody's layer, with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def test_a_layer_with_a_forward_pass_of_its_own_runs_alone():
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Halved(10))

    task, params, buffers = task_of(build)
    assert not task.vmappable
    client = ClientTask(task, buffers)
    client.value_and_grad(params, batch(6))
    assert_near(client.moved, by_torch(params, buffers, batch(6), build)[2])
